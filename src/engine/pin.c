/* engine/pin.c: records that stores are to keep. Keys follow from the tokens alone, so that nothing here
 * waits for a step or looks at the cache. */
#include <string.h>

#include "engine/engine.h"
#include "mem/mem.h"

static bool can_pin(const paged__stores *st) {
    for (int32_t i = 0; st && i < st->n_stores; i++)
        if (st->stores[i].pin) return true;
    return false;
}

/* Of the last token of an answer nothing was computed, unless a token that is no part of it has ended it. So
 * the tail with it and the one without it are pinned; the one that there is stays. */
static paged_status fill_keys(const paged_engine *e, const char *salt, const int32_t *tokens,
                              int32_t n_tokens, paged__pin *pin) {
    const int32_t size = e->config.block_size;
    paged__names names;
    paged_status status;
    size_t n_bytes = 0;
    uint8_t *bytes = paged__namespace_encode(paged__names_of(e, salt, &names), &n_bytes, &status);
    if (!bytes) return status;
    paged_key parent = paged__store_names_key(e->stores, bytes, n_bytes);
    paged__free(bytes);
    for (int32_t at = 0; at < n_tokens; at += size) {
        const int32_t n = PAGED_MIN(n_tokens - at, size);
        const paged_key before = parent;
        parent = pin->keys[pin->n_keys++] = paged__store_key(&before, tokens + at, n);
        if (at + n == n_tokens && n > 1)
            pin->keys[pin->n_keys++] = paged__store_key(&before, tokens + at, n - 1);
    }
    return PAGED_OK;
}

/* One that waits under the same name would be replaced at once. Returns it, for it to be freed. */
static paged__pin *take_queued(paged__stores *st, const char *name) {
    for (paged__pin **at = &st->first_pin; *at; at = &(*at)->next) {
        paged__pin *found = *at;
        if (found->tell || strcmp(found->name, name) != 0) continue;
        *at = found->next;
        if (st->last_pin == &found->next) st->last_pin = at;
        st->n_pins--;
        return found;
    }
    return NULL;
}

static bool queue(paged__stores *st, paged__pin *pin) {
    if (st->n_pins == PAGED__PINS) return false;
    pin->next = NULL;
    *st->last_pin = pin;
    st->last_pin = &pin->next;
    st->n_pins++;
    pthread_cond_signal(&st->work);
    return true;
}

paged_status paged_engine_pin(paged_engine *e, const char *name, const char *salt, const int32_t *tokens,
                              int32_t n_tokens, paged_error *err) {
    if (!e || !paged__is_name(name) || n_tokens < 0 || (n_tokens && !tokens))
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "no name of a note, or %d tokens", n_tokens);
    paged__stores *st = e->stores;
    if (!can_pin(st)) return paged__fail(err, PAGED_ERR_UNSUPPORTED, "no store here keeps pins");
    const size_t n_keys = n_tokens ? (size_t)n_tokens / (size_t)e->config.block_size + 2 : 0;
    paged__pin *pin = paged__calloc(1, sizeof *pin + n_keys * sizeof *pin->keys);
    if (!pin) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %zu keys", n_keys);
    strcpy(pin->name, name);
    const paged_status status = fill_keys(e, salt, tokens, n_tokens, pin);
    if (status) {
        paged__free(pin);
        return paged__fail(err, status, "the salt cannot be part of a key");
    }
    pthread_mutex_lock(&st->lock);
    paged__pin *before = take_queued(st, name);
    const bool ok = queue(st, pin);
    pthread_mutex_unlock(&st->lock);
    paged__free(before);
    if (ok) return PAGED_OK;
    paged__free(pin);
    return paged__fail(err, PAGED_ERR_LIMIT, "%d names wait to be pinned", PAGED__PINS);
}

paged_status paged_engine_pins(paged_engine *e, bool (*fn)(void *user, const char *name), void *user,
                               paged_error *err) {
    if (!e || !fn) return paged__fail(err, PAGED_ERR_INVALID_ARG, "engine or fn is NULL");
    paged__stores *st = e->stores;
    if (!can_pin(st)) return paged__fail(err, PAGED_ERR_UNSUPPORTED, "no store here keeps pins");
    paged__pin asked = {.tell = fn, .user = user};
    pthread_mutex_lock(&st->lock);
    const bool ok = queue(st, &asked);
    while (ok && !asked.told && !st->by_hand) pthread_cond_wait(&st->news, &st->lock);
    pthread_mutex_unlock(&st->lock);
    if (!ok) return paged__fail(err, PAGED_ERR_LIMIT, "%d names wait to be pinned", PAGED__PINS);
    while (!asked.told && paged__stores_work(e)) continue;
    if (asked.status) return paged__fail(err, asked.status, "a store does not tell what it keeps");
    return PAGED_OK;
}

static void tell_names(paged__stores *st, paged__pin *asked) {
    paged_status status = PAGED_OK;
    for (int32_t i = 0; i < st->n_stores && !status; i++) {
        const paged_store *store = &st->stores[i];
        if (!store->pin) continue;
        status =
            store->pins ? store->pins(store->self, asked->tell, asked->user, NULL) : PAGED_ERR_UNSUPPORTED;
    }
    pthread_mutex_lock(&st->lock);
    asked->status = status;
    asked->told = true;
    pthread_cond_broadcast(&st->news);
    pthread_mutex_unlock(&st->lock);
}

uint64_t paged__pin_work(paged__stores *st, paged__pin *pin) {
    uint64_t n_failed = 0;
    if (pin->tell) {
        tell_names(st, pin);
        return 0;
    }
    for (int32_t i = 0; i < st->n_stores; i++) {
        const paged_store *store = &st->stores[i];
        if (store->pin)
            n_failed += store->pin(store->self, pin->name, pin->keys, pin->n_keys, NULL) != PAGED_OK;
    }
    paged__free(pin);
    return n_failed;
}
