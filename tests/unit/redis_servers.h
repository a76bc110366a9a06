/* redis_servers.h: Redis servers of Debian's package for tests, each on a socket in a folder of its own, and
 * servers that are none: a thread that answers whatever comes with the bytes it was given. */
#ifndef PAGED_TESTS_REDIS_SERVERS_H
#define PAGED_TESTS_REDIS_SERVERS_H

#include <errno.h>
#include <fcntl.h>
#include <hiredis.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "test.h"

typedef struct test_redis {
    pid_t pid;
    char folder[64], socket[96], address[112]; /* address: as a store takes it */
    redisContext *line;                        /* of the test itself */
} test_redis;

static void sleep_ms(int ms) {
    nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL);
}

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* The program; NULL: there is none. Debian's redis-tools has it under another name, and it goes by the name
 * that it is called by. */
static const char *redis_program(void) {
    static const char *const PATHS[] = {"/usr/bin/redis-server", "/usr/bin/redis-check-rdb",
                                        "/usr/local/bin/redis-server"};
    for (size_t i = 0; i < sizeof PATHS / sizeof *PATHS; i++)
        if (access(PATHS[i], X_OK) == 0) return PATHS[i];
    return NULL;
}

static bool has_redis(const char *test) {
    if (redis_program()) return true;
    printf("%s: skipped, there is no redis-server (Debian's package redis-tools has it)\n", test);
    return false;
}

static void redis_start(test_redis *r) {
    if (!r->folder[0]) {
        strcpy(r->folder, "/tmp/paged-redis-XXXXXX");
        CHECK(mkdtemp(r->folder));
        snprintf(r->socket, sizeof r->socket, "%s/socket", r->folder);
        snprintf(r->address, sizeof r->address, "unix:%s", r->socket);
    }
    r->pid = fork();
    CHECK(r->pid >= 0);
    if (r->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        const int nowhere = open("/dev/null", O_RDWR);
        dup2(nowhere, 0);
        dup2(nowhere, 1);
        dup2(nowhere, 2);
        execl(redis_program(), "redis-server", "--port", "0", "--unixsocket", r->socket, "--save", "",
              "--appendonly", "no", "--dir", r->folder, "--daemonize", "no", (char *)NULL);
        _exit(127);
    }
    for (int i = 0; i < 1000; i++) {
        r->line = redisConnectUnix(r->socket);
        if (r->line && !r->line->err) return;
        if (r->line) redisFree(r->line);
        r->line = NULL;
        sleep_ms(10);
    }
    test_fail(__FILE__, __LINE__, "redis-server does not start");
}

static void redis_kill(test_redis *r) {
    if (r->line) redisFree(r->line);
    r->line = NULL;
    if (r->pid <= 0) return;
    kill(r->pid, SIGKILL);
    waitpid(r->pid, NULL, 0);
    unlink(r->socket);
    r->pid = 0;
}

static void redis_end(test_redis *r) {
    redis_kill(r);
    if (r->folder[0]) rmdir(r->folder);
    r->folder[0] = 0;
}

/* A command of the test's own; the reply is the caller's to free. */
__attribute__((format(printf, 2, 3), unused)) static redisReply *redis_do(test_redis *r, const char *format,
                                                                          ...) {
    va_list args;
    va_start(args, format);
    redisReply *reply = redisvCommand(r->line, format, args);
    va_end(args);
    CHECK(reply);
    return reply;
}

/* ---- servers that are none ---- */

typedef struct fake_server {
    char folder[64], socket[96], address[112];
    int listener, ms_between; /* between two bytes; 0: all at once */
    const char *bytes;        /* the answer to whatever comes, for each time that something comes */
    size_t n_bytes;
    bool closes, repeats; /* after the answer; again and again */
    atomic_bool stop;
    pthread_t thread;
} fake_server;

static void fake_answer(fake_server *f, int fd) {
    char in[65536];
    while (!f->stop) {
        struct pollfd ready = {.fd = fd, .events = POLLIN};
        if (poll(&ready, 1, 1) <= 0) continue;
        if (recv(fd, in, sizeof in, 0) <= 0) return;
        do {
            const size_t step = f->ms_between ? 1 : f->n_bytes;
            for (size_t at = 0; at < f->n_bytes && !f->stop; at += step) {
                if (send(fd, f->bytes + at, step, MSG_NOSIGNAL) < 0) return;
                if (f->ms_between) sleep_ms(f->ms_between);
            }
        } while (f->repeats && !f->stop);
        if (f->closes) return;
    }
}

static void *fake_main(void *arg) {
    fake_server *f = arg;
    while (!f->stop) {
        struct pollfd ready = {.fd = f->listener, .events = POLLIN};
        if (poll(&ready, 1, 1) <= 0) continue;
        const int fd = accept(f->listener, NULL, NULL);
        if (fd < 0) continue;
        const struct timeval patience = {0, 50000};
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
        fake_answer(f, fd);
        close(fd);
    }
    return NULL;
}

static void fake_start(fake_server *f) {
    strcpy(f->folder, "/tmp/paged-fake-XXXXXX");
    CHECK(mkdtemp(f->folder));
    snprintf(f->socket, sizeof f->socket, "%s/socket", f->folder);
    snprintf(f->address, sizeof f->address, "unix:%s", f->socket);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    strncpy(address.sun_path, f->socket, sizeof address.sun_path - 1);
    f->listener = socket(AF_UNIX, SOCK_STREAM, 0);
    CHECK(f->listener >= 0);
    CHECK(bind(f->listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(f->listener, 8) == 0);
    f->stop = false;
    CHECK(pthread_create(&f->thread, NULL, fake_main, f) == 0);
}

static void fake_end(fake_server *f) {
    f->stop = true;
    pthread_join(f->thread, NULL);
    close(f->listener);
    unlink(f->socket);
    rmdir(f->folder);
}

#endif
