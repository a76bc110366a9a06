/* tiny_model.h: writes a small LLaMA model with random weights as GGUF, through ggml's own writer, so that
 * engine tests run in a second and under every sanitizer. Vocabulary: the 256 bytes, a few merges, three
 * control tokens, ChatML. */
#ifndef PAGED_TESTS_TINY_MODEL_H
#define PAGED_TESTS_TINY_MODEL_H

#include <ggml.h>
#include <gguf.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct tiny_shape {
    int n_layers, n_heads, n_kv_heads, head_dim, n_ff, n_ctx;
    enum ggml_type type; /* of the matrices */
} tiny_shape;

enum { TINY_VOCAB = 262, TINY_EOS = 261 };

static uint64_t tiny_state;

static float tiny_random(void) { /* uniform in -1 … 1 */
    tiny_state = tiny_state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(tiny_state >> 32) / 2147483648.0f;
}

/* Values of `type`, stored as `stored`: the same, or f32. */
static void tiny_tensor(struct ggml_context *ctx, struct gguf_context *g, const char *name,
                        enum ggml_type type, enum ggml_type stored, int64_t ne0, int64_t ne1, float scale,
                        float offset) {
    struct ggml_tensor *t =
        ne1 == 1 ? ggml_new_tensor_1d(ctx, stored, ne0) : ggml_new_tensor_2d(ctx, stored, ne0, ne1);
    float *row = malloc((size_t)ne0 * sizeof *row), *packed = malloc((size_t)ne0 * sizeof *row);
    for (int64_t r = 0; r < ne1; r++) {
        for (int64_t i = 0; i < ne0; i++) row[i] = offset + scale * tiny_random();
        ggml_quantize_chunk(type, row, packed, 0, 1, ne0, NULL);
        if (stored != type) ggml_get_type_traits(type)->to_float(packed, row, ne0);
        memcpy((char *)t->data + (size_t)r * ggml_row_size(stored, ne0), stored == type ? packed : row,
               ggml_row_size(stored, ne0));
    }
    free(packed);
    free(row);
    ggml_set_name(t, name);
    gguf_add_tensor(g, t);
}

/* GPT-2's table from bytes to printable characters, as UTF-8. */
static void tiny_byte_piece(int byte, char out[4]) {
    int code = byte, n = 0;
    const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
    for (int b = 0; !printable && b < byte; b++)
        n += !((b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174);
    if (!printable) code = 256 + n;
    if (code < 128)
        snprintf(out, 4, "%c", code);
    else
        snprintf(out, 4, "%c%c", 0xC0 | (code >> 6), 0x80 | (code & 63));
}

static void tiny_vocab(struct gguf_context *g) {
    static char pieces[TINY_VOCAB][16];
    const char *tokens[TINY_VOCAB];
    int32_t types[TINY_VOCAB];
    static const char *const extra[] = {"he", "ll", "hell", "<|endoftext|>", "<|im_start|>", "<|im_end|>"};
    static const char *merges[] = {"h e", "l l", "he ll"};
    for (int i = 0; i < TINY_VOCAB; i++) {
        if (i < 256)
            tiny_byte_piece(i, pieces[i]);
        else
            snprintf(pieces[i], sizeof pieces[i], "%s", extra[i - 256]);
        tokens[i] = pieces[i];
        types[i] = i < 259 ? 1 : 3;
    }
    gguf_set_val_str(g, "tokenizer.chat_template",
                     "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + "
                     "'<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}"
                     "{{ '<|im_start|>assistant\\n' }}{% endif %}");
    gguf_set_val_str(g, "tokenizer.ggml.model", "gpt2");
    gguf_set_val_str(g, "tokenizer.ggml.pre", "smollm");
    gguf_set_arr_str(g, "tokenizer.ggml.tokens", tokens, TINY_VOCAB);
    gguf_set_arr_data(g, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types, TINY_VOCAB);
    gguf_set_arr_str(g, "tokenizer.ggml.merges", merges, 3);
    gguf_set_val_u32(g, "tokenizer.ggml.bos_token_id", 259);
    gguf_set_val_u32(g, "tokenizer.ggml.eos_token_id", TINY_EOS);
    gguf_set_val_bool(g, "tokenizer.ggml.add_bos_token", false);
}

/* V, up and down have the type `other`; with as_f32 all values are those of these types, but stored as f32.
 * Returns false when the file could not be written. */
static bool tiny_model_write_mixed(const char *path, const tiny_shape *s, uint64_t seed, enum ggml_type other,
                                   bool as_f32) {
    struct ggml_context *ctx = ggml_init((struct ggml_init_params){.mem_size = (size_t)64 << 20});
    struct gguf_context *g = gguf_init_empty();
    const int n_embd = s->n_heads * s->head_dim;
    const float w = 1.0f / sqrtf((float)n_embd);
    char name[64];
    tiny_state = seed;
    gguf_set_val_str(g, "general.architecture", "llama");
    gguf_set_val_str(g, "general.name", "tiny");
    gguf_set_val_u32(g, "llama.block_count", (uint32_t)s->n_layers);
    gguf_set_val_u32(g, "llama.context_length", (uint32_t)s->n_ctx);
    gguf_set_val_u32(g, "llama.embedding_length", (uint32_t)n_embd);
    gguf_set_val_u32(g, "llama.feed_forward_length", (uint32_t)s->n_ff);
    gguf_set_val_u32(g, "llama.attention.head_count", (uint32_t)s->n_heads);
    gguf_set_val_u32(g, "llama.attention.head_count_kv", (uint32_t)s->n_kv_heads);
    gguf_set_val_f32(g, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    gguf_set_val_f32(g, "llama.rope.freq_base", 10000.0f);
    tiny_vocab(g);
    tiny_tensor(ctx, g, "token_embd.weight", s->type, as_f32 ? GGML_TYPE_F32 : s->type, n_embd, TINY_VOCAB,
                1.0f, 0);
    tiny_tensor(ctx, g, "output_norm.weight", GGML_TYPE_F32, GGML_TYPE_F32, n_embd, 1, 0.3f, 1);
    for (int l = 0; l < s->n_layers; l++) {
        const struct {
            const char *part;
            int64_t ne0, ne1;
        } parts[] = {{"attn_norm", n_embd, 1},
                     {"attn_q", n_embd, n_embd},
                     {"attn_k", n_embd, (int64_t)s->n_kv_heads * s->head_dim},
                     {"attn_v", n_embd, (int64_t)s->n_kv_heads * s->head_dim},
                     {"attn_output", n_embd, n_embd},
                     {"ffn_norm", n_embd, 1},
                     {"ffn_gate", n_embd, s->n_ff},
                     {"ffn_up", n_embd, s->n_ff},
                     {"ffn_down", s->n_ff, n_embd}};
        for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
            const bool is_norm = parts[i].ne1 == 1, is_other = i == 3 || i == 7 || i == 8;
            const enum ggml_type type = is_norm ? GGML_TYPE_F32 : is_other ? other : s->type;
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, parts[i].part);
            tiny_tensor(ctx, g, name, type, as_f32 ? GGML_TYPE_F32 : type, parts[i].ne0, parts[i].ne1,
                        is_norm ? 0.3f : 2 * w, is_norm ? 1 : 0);
        }
    }
    const bool ok = gguf_write_to_file(g, path, false);
    gguf_free(g);
    ggml_free(ctx);
    return ok;
}

__attribute__((unused)) static bool tiny_model_write(const char *path, const tiny_shape *s, uint64_t seed) {
    return tiny_model_write_mixed(path, s, seed, s->type, false);
}

#endif
