/* cli/text.c: text from options, files and stdin. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/base.h"
#include "cli/cli.h"

static int add(paged__cli *cli, const char *name, const char *data, size_t size_bytes, paged__buffer *text) {
    if (size_bytes > PAGED__TEXT_MAX - text->len) {
        return paged__error(cli, "%s is longer than %d MiB, the longest text", name, PAGED__TEXT_MAX >> 20);
    }
    if (paged__buffer_append(text, data, size_bytes)) return PAGED__EXIT_OK;
    return paged__error(cli, "cannot hold %s: %s", name, paged_status_text(PAGED_ERR_NO_MEMORY));
}

static int read_all(paged__cli *cli, int fd, const char *name, paged__buffer *text) {
    char piece[65536];
    int code = PAGED__EXIT_OK;
    while (code == PAGED__EXIT_OK) {
        ssize_t n = read(fd, piece, sizeof piece);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return paged__error(cli, "cannot read %s: %s", name, strerror(errno));
        if (n == 0) break;
        code = add(cli, name, piece, (size_t)n, text);
    }
    return code;
}

int paged__text_take(paged__cli *cli, const char *given, const char *path, paged__buffer *text) {
    int code;
    if (given) {
        code = add(cli, "the text", given, strlen(given), text);
    } else if (strcmp(path, "-") == 0) {
        code = read_all(cli, STDIN_FILENO, "standard input", text);
    } else {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) return paged__error(cli, "cannot open %s: %s", path, strerror(errno));
        code = read_all(cli, fd, path, text);
        close(fd);
    }
    if (code == PAGED__EXIT_OK && !paged__buffer_append(text, "", 1)) {
        return paged__error(cli, "%s", paged_status_text(PAGED_ERR_NO_MEMORY));
    }
    if (code == PAGED__EXIT_OK) text->len--;
    return code;
}
