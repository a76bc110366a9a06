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
    for (int32_t i = 0; i < pin->n_keys; i++) {
        const int32_t at = i * size;
        parent = pin->keys[i] = paged__store_key(&parent, tokens + at, PAGED_MIN(n_tokens - at, size));
    }
    return PAGED_OK;
}

paged_status paged_engine_pin(paged_engine *e, const char *name, const char *salt, const int32_t *tokens,
                              int32_t n_tokens, paged_error *err) {
    if (!e || !name || !name[0] || strlen(name) >= sizeof((paged__pin *)0)->name || n_tokens < 0 ||
        (n_tokens && !tokens))
        return paged__fail(err, PAGED_ERR_INVALID_ARG, "no name of at most 128 bytes, or %d tokens",
                           n_tokens);
    paged__stores *st = e->stores;
    if (!can_pin(st)) return paged__fail(err, PAGED_ERR_UNSUPPORTED, "no store here keeps pins");
    const int32_t size = e->config.block_size, n_keys = n_tokens / size + (n_tokens % size > 0);
    paged__pin *pin = paged__calloc(1, sizeof *pin + (size_t)n_keys * sizeof *pin->keys);
    if (!pin) return paged__fail(err, PAGED_ERR_NO_MEMORY, "no memory for %d keys", n_keys);
    strcpy(pin->name, name);
    pin->n_keys = n_keys;
    const paged_status status = fill_keys(e, salt, tokens, n_tokens, pin);
    if (status) {
        paged__free(pin);
        return paged__fail(err, status, "the salt cannot be part of a key");
    }
    pthread_mutex_lock(&st->lock);
    if (st->last_pin)
        st->last_pin->next = pin;
    else
        st->first_pin = pin;
    st->last_pin = pin;
    pthread_cond_signal(&st->work);
    pthread_mutex_unlock(&st->lock);
    return PAGED_OK;
}

uint64_t paged__pin_work(const paged__stores *st, paged__pin *pin) {
    uint64_t n_failed = 0;
    for (int32_t i = 0; i < st->n_stores; i++) {
        const paged_store *store = &st->stores[i];
        if (store->pin)
            n_failed += store->pin(store->self, pin->name, pin->keys, pin->n_keys, NULL) != PAGED_OK;
    }
    paged__free(pin);
    return n_failed;
}
