/* model/model.c: from a checked GGUF file to a paged_model, and facts about it. The numbers of the file are
 * read by hparams.c, its tensors by load.c, both in the words of the family's file in arch/.
 */
#include "model/model.h"

#include <ggml-cpu.h>
#include <stdio.h>

#include "model/chat.h"

/* Adding a family: its file in arch/ and its name here. */
static const paged__arch *const archs[] = {&paged__arch_falcon, &paged__arch_gemma2, &paged__arch_gemma3,
                                           &paged__arch_gpt2,   &paged__arch_llama,  &paged__arch_phi3,
                                           &paged__arch_qwen2,  &paged__arch_qwen3,  &paged__arch_smollm3};

static paged_status find_arch(const char *name, const paged__arch **out, paged_error *err) {
    char known[200] = "";
    size_t n = 0;
    for (size_t i = 0; i < sizeof archs / sizeof archs[0]; i++) {
        *out = archs[i];
        if (strcmp(archs[i]->name, name) == 0) return PAGED_OK;
        if (n < sizeof known) n += (size_t)snprintf(known + n, sizeof known - n, " %s", archs[i]->name);
    }
    return paged__fail(err, PAGED_ERR_UNSUPPORTED, "architecture \"%.60s\" is not supported; these are:%s",
                       name, known);
}

static paged_status load(paged_model *m, const char *path, const paged_model_config *config,
                         paged_error *err) {
    const char *arch_name = NULL;
    paged_status s = paged__gguf_open(path, &m->file, err);
    if (s) return s;
    if ((s = paged__gguf_str(m->file, "general.architecture", true, &arch_name, err))) return s;
    m->name = "";
    if ((s = paged__gguf_str(m->file, "general.name", false, &m->name, err))) return s;
    if ((s = paged__gguf_str(m->file, "tokenizer.chat_template", false, &m->chat_template, err))) return s;
    if ((s = find_arch(arch_name, &m->arch, err))) return s;
    if ((s = paged__model_hparams(m, err))) return s;
    if ((s = paged__tokenizer_create(m->file, &m->tok, err))) return s;
    m->hp.n_vocab = paged_token_count(m->tok);
    if (m->chat_template && (s = paged__chat_create(m->chat_template, m->tok, &m->chat, err))) return s;
    if (config->vocab_only) {
        m->vocab_only = true;
        return PAGED_OK;
    }
    if ((s = paged__model_tensors(m, err))) return s;
    ggml_cpu_init(); /* the tables behind its conversions */
    return paged__model_pack(m, config->linear, config->progress, config->progress_user, err);
}

paged_status paged_model_load(const char *path, const paged_model_config *config, paged_model **out,
                              paged_error *err) {
    if (!path || !out) return paged__fail(err, PAGED_ERR_INVALID_ARG, "%s is NULL", path ? "out" : "path");
    paged_model_config c = {0};
    if (config) {
        if (config->struct_size < sizeof config->struct_size || config->struct_size > sizeof c)
            return paged__fail(err, PAGED_ERR_INVALID_ARG, "struct_size is %zu, this library knows up to %zu",
                               config->struct_size, sizeof c);
        memcpy(&c, config, config->struct_size);
    }
    if ((unsigned)c.linear > PAGED_LINEAR_BF16)
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "linear is %d", (int)c.linear);
    if (c.linear == PAGED_LINEAR_BF16 && !c.vocab_only && !paged__linear_bf16())
        return paged__fail(err, PAGED_ERR_UNSUPPORTED,
                           "linear bf16 asks for a processor with AMX, and here are %s",
                           paged__linear_kernels());
    const uint64_t start = paged__now_ns();
    paged_model *m = paged__calloc(1, sizeof *m);
    if (!m) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for a model");
    paged_error why = {0};
    paged_status s = load(m, path, &c, &why);
    if (s) {
        paged_model_free(m);
        /* The file's own messages begin with its path already. */
        const bool named = strncmp(why.message, path, strlen(path)) == 0;
        return paged__fail(err, s, "%s%s%s", named ? "" : path, named ? "" : ": ", why.message);
    }
    m->load_ms = (double)(paged__now_ns() - start) / 1e6;
    *out = m;
    return PAGED_OK;
}

void paged_model_free(paged_model *m) {
    if (!m) return;
    paged__free(m->packed);
    paged__free(m->weights);
    paged__free(m->layers);
    paged__chat_free(m->chat);
    paged__tokenizer_free(m->tok);
    paged__gguf_close(m->file);
    paged__free(m);
}

const paged_tokenizer *paged_model_tokenizer(const paged_model *m) {
    return m->tok;
}

paged_status paged_chat_render(const paged_model *m, const paged_chat *chat, paged_prompt *out,
                               paged_error *err) {
    return paged__chat_render(m->chat, chat, out, err);
}

paged_status paged_chat_tokenize(const paged_model *m, const paged_message *messages, int32_t n_messages,
                                 bool add_generation_prompt, int32_t *tokens, int32_t capacity,
                                 int32_t *n_tokens, char *text, size_t text_capacity, paged_error *err) {
    const paged_chat chat = {.struct_size = sizeof chat,
                             .messages = messages,
                             .n_messages = n_messages,
                             .add_generation_prompt = add_generation_prompt};
    return paged__chat_tokenize(m->chat, &chat, tokens, capacity, n_tokens, text, text_capacity, err);
}

static void count_weight(paged_model_info *info, const paged__gguf_tensor *t) {
    const char *name = ggml_type_name(t->type);
    int32_t i = 0;
    while (i < info->n_weight_types && strcmp(info->weight_types[i].name, name) != 0) i++;
    if (i == PAGED_WEIGHT_TYPES_MAX) return;
    if (i == info->n_weight_types) info->weight_types[info->n_weight_types++].name = name;
    info->weight_types[i].n_tensors++;
    info->weight_types[i].bytes += t->size_bytes;
}

void paged_model_get_info(const paged_model *m, paged_model_info *info) {
    const paged__hparams *hp = &m->hp;
    *info = (paged_model_info){
        .arch = m->arch->name,
        .name = m->name,
        .chat_template = m->chat_template,
        .tokenizer = paged__tokenizer_kind(m->tok),
        .pre = paged__tokenizer_pre(m->tok),
        .n_layers = hp->n_layers,
        .n_embd = hp->n_embd,
        .n_ff = hp->n_ff,
        .n_heads = hp->n_heads,
        .n_kv_heads = hp->n_kv_heads,
        .head_dim_k = hp->head_dim_k,
        .head_dim_v = hp->head_dim_v,
        .n_vocab = hp->n_vocab,
        .n_ctx_train = hp->n_ctx_train,
        .n_tensors = paged__gguf_n_tensors(m->file),
        .file_bytes = paged__gguf_file_bytes(m->file),
        .weight_bytes = paged__gguf_data_bytes(m->file),
        .packed_bytes = m->packed_bytes,
        .linear_kernels = m->linear_kernels,
        .load_ms = m->load_ms,
        .rope_freq_base = hp->rope[0].base,
        .window = hp->window,
        .tied_output = !paged__gguf_find(m->file, "output.weight"),
    };
    for (int32_t i = 0; i < hp->n_layers; i++) info->n_windowed_layers += m->layers[i].windowed;
    for (int32_t i = 0; i < info->n_tensors; i++) {
        const paged__gguf_tensor *t = paged__gguf_tensor_at(m->file, i);
        info->n_params += t->ne[0] * t->ne[1] * t->ne[2] * t->ne[3];
        count_weight(info, t);
    }
}
