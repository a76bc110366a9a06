/* attn_cut.c: cuts the line of work (attn.h) into parts of nearly equal cost. */
#include "ops/attn.h"

/* The last entry that begins at or before `cost`. */
static int32_t find_entry(const paged_attn *attn, int64_t cost) {
    int32_t low = 0, high = attn->n_entries - 1;
    while (low < high) {
        int32_t middle = low + (high - low + 1) / 2;
        if (attn->entries[middle].cost_before <= cost)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

paged__cut paged__cut_at(const paged_attn *attn, int32_t b, int32_t nth) {
    int32_t n_kv_heads = attn->config.n_kv_heads;
    if (b <= 0 || attn->n_entries == 0) return (paged__cut){0, 0};
    if (b >= nth) return (paged__cut){(int64_t)attn->n_entries * n_kv_heads, 0};

    int64_t cost = attn->cost / nth * b + attn->cost % nth * b / nth;
    int32_t index = find_entry(attn, cost);
    const paged__entry *entry = &attn->entries[index];
    int64_t rest = cost - entry->cost_before;
    paged__cut cut = {(int64_t)index * n_kv_heads + rest / entry->cost, 0};
    rest %= entry->cost;
    /* To the nearest place that may be cut. */
    int32_t n_parts = paged__entry_can_cut(attn, entry) ? entry->n_splits : 1;
    cut.split = (int32_t)((rest * n_parts + entry->cost / 2) / entry->cost);
    if (cut.split == n_parts) {
        cut.unit++;
        cut.split = 0;
    }
    return cut;
}
