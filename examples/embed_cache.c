/* embed_cache.c: libpaged without a model: a cache, a sequence, its keys and values, and attention through
 * the block table: what an engine does for every layer of every step.
 *
 *     cc embed_cache.c $(pkg-config --cflags --libs paged)
 */
#include <paged/paged.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 2, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 64, TOKENS = 20 };

static void ok(paged_status status, const paged_error *err) {
    if (status == PAGED_OK) return;
    fprintf(stderr, "%s: %s\n", paged_status_name(status), err ? err->message : paged_status_text(status));
    exit(1);
}

static void fill(float *x, int n) {
    for (int i = 0; i < n; i++) x[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

int main(void) {
    paged_error err;

    /* One group: all layers, since they all keep the same tokens. The pool holds 8 blocks of 16 tokens. */
    paged_group_config group = {.n_layers = LAYERS,
                                .n_kv_heads = KV_HEADS,
                                .head_dim_k = HEAD_DIM,
                                .type = PAGED_TYPE_F16,
                                .layout = PAGED_LAYOUT_PACKED};
    paged_cache_config cache_config = {.struct_size = sizeof cache_config,
                                       .groups = &group,
                                       .n_groups = 1,
                                       .pool_bytes = 8 * paged_block_bytes(&group, 16)};
    paged_cache *cache;
    ok(paged_cache_create(&cache_config, &cache, &err), &err);

    paged_attn_config attn_config = {.struct_size = sizeof attn_config,
                                     .n_heads = HEADS,
                                     .n_kv_heads = KV_HEADS,
                                     .head_dim_k = HEAD_DIM,
                                     .block_size = 16,
                                     .type = group.type,
                                     .layout = group.layout,
                                     .max_q = TOKENS};
    paged_attn *attn;
    ok(paged_attn_create(&attn_config, &attn, &err), &err);

    /* Reserve takes the blocks, slots says where they are. */
    paged_seq seq;
    int64_t slots[TOKENS];
    ok(paged_seq_create(cache, &seq), NULL);
    ok(paged_seq_reserve(cache, seq, TOKENS), NULL);
    ok(paged_seq_slots(cache, seq, 0, 0, TOKENS, slots), NULL);

    /* Plan once per step: 20 queries of one sequence that has 20 keys. */
    int32_t cu_seqlens_q[] = {0, TOKENS}, seqlens_k[] = {TOKENS}, rows[] = {paged_seq_row(cache, seq)};
    paged_batch batch = {.cu_seqlens_q = cu_seqlens_q};
    ok(paged_cache_tables(cache, 0, &batch.tables), NULL);
    batch.tables.rows = rows;
    batch.tables.seqlens_k = seqlens_k;
    batch.tables.n_seqs = 1;
    paged_kv kv;
    ok(paged_cache_kv(cache, 0, 0, &kv), NULL);
    ok(paged_attn_plan(attn, &batch, &kv, &err), &err);

    /* Run once per layer. q, k and v would come from the model; `ith` of `nth` threads is 0 of 1 here. */
    static float q[TOKENS * HEADS * HEAD_DIM], out[TOKENS * HEADS * HEAD_DIM];
    static float k[TOKENS * KV_HEADS * HEAD_DIM], v[TOKENS * KV_HEADS * HEAD_DIM];
    for (int layer = 0; layer < LAYERS; layer++) {
        ok(paged_cache_kv(cache, 0, layer, &kv), NULL);
        fill(q, TOKENS * HEADS * HEAD_DIM);
        fill(k, TOKENS * KV_HEADS * HEAD_DIM);
        fill(v, TOKENS * KV_HEADS * HEAD_DIM);
        paged_kv_write(&kv, k, 0, v, 0, slots, TOKENS, 0, 1);
        paged_attn_run(attn, &kv, &(paged_attn_io){.q = q, .out = out}, 0, 1);
        if (paged_attn_needs_merge(attn)) paged_attn_merge(attn, &(paged_attn_io){.out = out}, 0, 1);
        printf("layer %d: the last token sees %d keys, out[0] = %+.4f\n", layer, TOKENS,
               out[(TOKENS - 1) * HEADS * HEAD_DIM]);
    }

    /* Only now do the tokens count. Their ids stand for the content of the blocks. */
    int32_t tokens[TOKENS];
    for (int i = 0; i < TOKENS; i++) tokens[i] = i;
    ok(paged_seq_commit(cache, seq, tokens, TOKENS), NULL);
    paged_cache_stats stats;
    paged_cache_get_stats(cache, &stats);
    printf("%s kernels, %d of %d blocks in use\n", paged_attn_kernels(attn), stats.n_used, stats.n_blocks);

    ok(paged_seq_free(cache, seq), NULL);
    paged_attn_free(attn);
    paged_cache_free(cache);
    return 0;
}
