/* cli/stores.c: see stores.h. */
#include "cli/stores.h"

#include "paged/file_store.h"

static int open_files(paged__cli *cli, const paged__files_options *files, paged__cli_stores *out) {
    const paged_file_store_config config = {.struct_size = sizeof config,
                                            .dir = files->dir,
                                            .max_bytes = files->max_bytes,
                                            .ttl_s = files->ttl_s};
    paged_error err;
    if (!files->dir || !files->dir[0]) return PAGED__EXIT_OK;
    const paged_status status = paged_file_store_create(&config, &out->all[out->n], &out->notes, &err);
    if (status != PAGED_OK) return paged__error(cli, "--store: %s", err.message);
    out->n++;
    out->has_notes = true;
    return PAGED__EXIT_OK;
}

int paged__cli_stores_open(paged__cli *cli, const paged__stores_options *options, paged__cli_stores *out) {
    paged_notes notes;
    bool is_there;
    *out = (paged__cli_stores){0};
    int code = open_files(cli, &options->files, out);
    if (code == PAGED__EXIT_OK)
        code = paged__redis_open(cli, &options->redis, &out->all[out->n], &notes, &is_there);
    if (code != PAGED__EXIT_OK) {
        paged__cli_stores_close(out);
        return code;
    }
    if (!is_there) return PAGED__EXIT_OK;
    out->n++;
    if (out->has_notes) out->notes.close(out->notes.self);
    out->notes = notes;
    out->has_notes = true;
    return PAGED__EXIT_OK;
}

void paged__cli_stores_close(paged__cli_stores *s) {
    for (int32_t i = 0; i < s->n; i++) s->all[i].close(s->all[i].self);
    if (s->has_notes) s->notes.close(s->notes.self);
    *s = (paged__cli_stores){0};
}
