/* cli/places.c: see places.h. */
#include "cli/places.h"

#include "paged/file_store.h"

static int open_files(paged__cli *cli, const paged__places_options *options, paged__places *out) {
    const paged_file_store_config config = {.struct_size = sizeof config,
                                            .dir = options->dir,
                                            .max_bytes = options->max_bytes,
                                            .ttl_s = options->ttl_s};
    paged_error err;
    if (!options->dir || !options->dir[0]) return PAGED__EXIT_OK;
    const paged_status status = paged_file_store_create(&config, &out->all[out->n], &out->notes, &err);
    if (status != PAGED_OK) return paged__error(cli, "--store: %s", err.message);
    out->n++;
    out->has_notes = true;
    return PAGED__EXIT_OK;
}

int paged__places_open(paged__cli *cli, const paged__places_options *options, paged__places *out) {
    paged_notes notes;
    bool is_there;
    *out = (paged__places){0};
    int code = open_files(cli, options, out);
    if (code == PAGED__EXIT_OK)
        code = paged__redis_open(cli, &options->redis, &out->all[out->n], &notes, &is_there);
    if (code != PAGED__EXIT_OK) {
        paged__places_close(out);
        return code;
    }
    if (!is_there) return PAGED__EXIT_OK;
    out->n++;
    if (out->has_notes) out->notes.close(out->notes.self);
    out->notes = notes;
    out->has_notes = true;
    return PAGED__EXIT_OK;
}

void paged__places_close(paged__places *p) {
    for (int32_t i = 0; i < p->n; i++) p->all[i].close(p->all[i].self);
    if (p->has_notes) p->notes.close(p->notes.self);
    *p = (paged__places){0};
}
