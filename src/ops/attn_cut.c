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

/* The item of a KV head of a cascade that begins nearest to `cost`, counted from the head's begin. */
static int32_t nearest_item(const paged_attn *attn, const paged__entry *entry, int64_t cost) {
    int64_t own_cost = 0;
    for (int32_t i = 0; i < entry->n_own; i++) own_cost += attn->owns[entry->own + i].cost;
    int64_t split_cost = (entry->cost - own_cost) / entry->n_splits, at = 0;
    for (int32_t item = 0; item < paged__head_items(entry); item++) {
        int64_t n =
            item < entry->n_splits ? split_cost : attn->owns[entry->own + item - entry->n_splits].cost;
        if (cost - at <= n / 2) return item;
        at += n;
    }
    return paged__head_items(entry);
}

paged__cut paged__cut_at(const paged_attn *attn, int32_t b, int32_t nth) {
    if (b <= 0 || attn->n_entries == 0) return (paged__cut){0, 0};
    if (b >= nth) return (paged__cut){attn->n_entries, 0};

    int64_t n_heads = attn->config.n_kv_heads, cost = attn->cost / nth * b + attn->cost % nth * b / nth;
    int32_t index = find_entry(attn, cost);
    const paged__entry *entry = &attn->entries[index];
    if (entry->is_prefix) {
        int64_t of_entry = cost - entry->cost_before, head = of_entry / entry->cost;
        int64_t item = head * paged__head_items(entry) + nearest_item(attn, entry, of_entry % entry->cost);
        if (item == n_heads * paged__head_items(entry)) return (paged__cut){index + 1, 0};
        return (paged__cut){index, (int32_t)item};
    }
    int64_t all = entry->cost * n_heads, n_parts = paged__entry_parts(attn, entry);
    /* To the nearest item. */
    int64_t parts = (cost - entry->cost_before) * n_parts;
    int64_t item = parts / all * n_heads + (parts % all * n_heads + all / 2) / all;
    if (item == n_parts * n_heads) return (paged__cut){index + 1, 0};
    return (paged__cut){index, (int32_t)item};
}

bool paged__cut_keeps(const paged_attn *attn, paged__cut cut, int32_t nth) {
    int32_t index = paged__entry_before(cut);
    if (index < 0 || nth == 1) return false;
    const paged__entry *entry = &attn->entries[index];
    if (!entry->is_prefix) return paged__entry_can_cut(attn, entry);
    return cut.item % paged__head_items(entry) != 0;
}

bool paged__cuts_share_piece(const paged_attn *attn, paged__cut before, paged__cut cut) {
    int32_t index = paged__entry_before(cut), begin = 0;
    if (paged__entry_before(before) != index) return false;
    const paged__entry *entry = &attn->entries[index];
    if (entry->is_prefix) begin = cut.item - cut.item % paged__head_items(entry);
    return before.entry != index || before.item > begin;
}

int32_t paged__first_cut(const paged_attn *attn, int32_t b, int32_t nth) {
    const paged__cut at = paged__cut_at(attn, b, nth);
    int32_t low = 1;
    while (low < b) {
        int32_t middle = low + (b - low) / 2;
        if (paged__cuts_share_piece(attn, paged__cut_at(attn, middle, nth), at))
            b = middle;
        else
            low = middle + 1;
    }
    return b;
}
