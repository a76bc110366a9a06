/* cli/redis.c: see redis.h. The password comes from a file or the environment, since others on this machine
 * can see a command line. */
#include "cli/redis.h"

#include <stdlib.h>
#include <string.h>

#include "base/base.h"

static void wipe(paged__buffer *text) {
    if (text->data) explicit_bzero(text->data, text->len);
    paged__buffer_free(text);
}

int paged__redis_open(paged__cli *cli, const paged__redis_options *o, paged_store *store, paged_notes *notes,
                      bool *is_there) {
    *is_there = false;
    if (!o->servers || !o->servers[0]) {
        const bool rest = o->user || o->password_file || o->ttl_s || o->timeout_ms;
        return rest ? paged__usage_error(cli, "options of Redis without --redis SERVERS") : PAGED__EXIT_OK;
    }
    paged__buffer text = {0};
    const char *password = getenv("PAGED_REDIS_PASSWORD");
    if (o->password_file) {
        const int code = paged__text_take(cli, NULL, o->password_file, &text);
        if (code != PAGED__EXIT_OK) return code;
        text.data[strcspn(text.data, "\r\n")] = 0;
        password = text.data;
    }
    const paged_redis_store_config config = {.struct_size = sizeof config,
                                             .servers = o->servers,
                                             .user = o->user,
                                             .password = password && password[0] ? password : NULL,
                                             .prefix = o->prefix,
                                             .ttl_s = o->ttl_s,
                                             .timeout_ms = o->timeout_ms};
    paged_error err;
    const paged_status status = paged_redis_store_create(&config, store, notes, &err);
    wipe(&text);
    if (status == PAGED_ERR_INVALID_ARG) return paged__usage_error(cli, "--redis: %s", err.message);
    if (status != PAGED_OK) return paged__error(cli, "%s", err.message);
    *is_there = true;
    return PAGED__EXIT_OK;
}
