/* use_core.c: a stranger's program over the installed libpaged: writes keys and values of one sequence
 * through its slots and lets attention read them back through the block table. One key of each head: the
 * output must be its value.
 */
#include <paged/paged.h>
#include <stdio.h>
#include <string.h>

enum { N_HEADS = 2, N_KV_HEADS = 1, HEAD_DIM = 32 };

static int fail(const char *what, const paged_error *err) {
    fprintf(stderr, "%s: %s\n", what, err->message);
    return 1;
}

int main(void) {
    paged_error err = {0};
    paged_group_config group = {
        .n_layers = 1, .n_kv_heads = N_KV_HEADS, .head_dim_k = HEAD_DIM, .type = PAGED_TYPE_F32};
    paged_cache_config config = {.struct_size = sizeof config, .groups = &group, .n_groups = 1};
    paged_attn_config attn_config = {.struct_size = sizeof attn_config,
                                     .n_heads = N_HEADS,
                                     .n_kv_heads = N_KV_HEADS,
                                     .head_dim_k = HEAD_DIM,
                                     .block_size = 16,
                                     .type = PAGED_TYPE_F32};
    paged_cache *cache = NULL;
    paged_attn *attn = NULL;
    paged_seq seq = 0;
    paged_kv kv;
    paged_tables tables = {0};
    int64_t slot = -1;
    const int32_t token = 7, seqlen = 1, cu_seqlens_q[2] = {0, 1};
    float k[HEAD_DIM], v[HEAD_DIM], q[N_HEADS * HEAD_DIM], out[N_HEADS * HEAD_DIM];

    config.pool_bytes = paged_pool_bytes_for(&group, 1, 16, 64);
    if (paged_cache_create(&config, &cache, &err)) return fail("cache", &err);
    if (paged_seq_create(cache, &seq) || paged_seq_reserve(cache, seq, 1) ||
        paged_seq_slots(cache, seq, 0, 0, 1, &slot) || paged_cache_kv(cache, 0, 0, &kv) ||
        paged_cache_tables(cache, 0, &tables))
        return fail("sequence", &err);
    for (int i = 0; i < HEAD_DIM; i++) k[i] = 0.5f, v[i] = (float)i, q[i] = q[HEAD_DIM + i] = 1.0f;
    paged_kv_write(&kv, k, HEAD_DIM, v, HEAD_DIM, &slot, 1, 0, 1);
    if (paged_seq_commit(cache, seq, &token, 1)) return fail("commit", &err);

    const int32_t row = paged_seq_row(cache, seq);
    tables.rows = &row;
    tables.seqlens_k = &seqlen;
    tables.n_seqs = 1;
    paged_batch batch = {.cu_seqlens_q = cu_seqlens_q, .tables = tables};
    if (paged_attn_create(&attn_config, &attn, &err)) return fail("attention", &err);
    if (paged_attn_plan(attn, &batch, &kv, &err)) return fail("plan", &err);
    paged_attn_run(attn, &kv, &(paged_attn_io){.q = q, .out = out}, 0, 1);
    paged_attn_merge(attn, &(paged_attn_io){.out = out}, 0, 1);
    for (int h = 0; h < N_HEADS; h++) {
        if (memcmp(out + h * HEAD_DIM, v, sizeof v) != 0) return fail("the output is not the value", &err);
    }
    paged_attn_free(attn);
    paged_cache_free(cache);
    printf("%s %s\n", paged_version(), PAGED_VERSION_STRING);
    return 0;
}
