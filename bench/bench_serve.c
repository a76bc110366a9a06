/* bench/bench_serve.c: a client of servers that costs next to nothing, so that they are what is measured.
 * bench_serve.py drives it; see there what is asked for.
 *
 *     open PID PORT N PROMPT TOKENS VOCAB    close what is open; N streams of PROMPT prompt tokens and TOKENS
 *                                            tokens each, until each of them has begun
 *     round N                                N more tokens of everything that is open
 *     watch N                                the same, and the time between any two of the first stream
 *
 * Between two commands the server is stopped (SIGSTOP), so that several of them and the bare engine take
 * turns within a fraction of a second, in the middle of their streams. A round begins with the twelfth token
 * after the stop, when threads have found their cores again, which no server in use has to do, and ends with
 * the N-th that follows, both seen as they come. Between them the client sleeps,
 * since it would run on the server's cores: it looks a few times, and at each of the last three tokens. A
 * round whose end it slept through says that it took no CPU time, so it does not count. `watch` looks at each
 * token.
 * Only the first stream is looked at: the tokens of the others come in the same steps.
 *
 *     {"done": tokens of the first stream so far, "tokens": of all streams, "seconds": wall, "cpu_seconds":
 *      of the server and of this program, "gaps": [seconds between two tokens, …]}
 *
 * Errors: one line on stderr, status 1.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bench/protocol.h"

enum {
    STREAMS_MAX = 64,
    ROUND_MAX = 1024,
    TIMEOUT_MS = 60000,
    FIRST_NAP_NS = 10000000,
    NAP_NS = 900000000,
    WARM = 12, /* tokens; of bench_serve.py as well */
    NEAR = 3   /* tokens */
};

static const char MARK[] = "\"text\":\""; /* of a token, if what follows is not the end of the string */

typedef struct stream {
    int fd;
    size_t matched;
    int64_t n_tokens;
} stream;

typedef struct client {
    pid_t server;
    stream streams[STREAMS_MAX];
    int n;
} client;

static bool fail(const char *what) {
    fprintf(stderr, "bench_serve: %s%s%s\n", what, errno ? ": " : "", errno ? strerror(errno) : "");
    return false;
}

/* ---- one stream ---- */

static void count(stream *s, const char *data, size_t n) {
    for (size_t i = 0; i < n; i++) {
        if (s->matched == sizeof MARK - 1) {
            s->n_tokens += data[i] != '"';
            s->matched = 0;
        } else {
            s->matched = data[i] == MARK[s->matched] ? s->matched + 1 : data[i] == MARK[0];
        }
    }
}

/* What has come; waits for something if there is nothing and `waits`. */
static bool take(stream *s, bool waits) {
    char data[1 << 16];
    struct pollfd ready = {.fd = s->fd, .events = POLLIN};
    errno = 0;
    if (waits && poll(&ready, 1, TIMEOUT_MS) != 1) return fail("a stream does not go on");
    const ssize_t n = recv(s->fd, data, sizeof data, MSG_DONTWAIT);
    if (n == 0) return fail("a stream has ended before its time");
    if (n < 0) return errno == EAGAIN || fail("recv");
    count(s, data, (size_t)n);
    return (size_t)n < sizeof data || take(s, false);
}

static bool wait_for(stream *s, int64_t n_tokens) {
    while (s->n_tokens < n_tokens)
        if (!take(s, true)) return false;
    return true;
}

static bool send_request(const stream *s, int32_t request, int n_prompt, int n_tokens, int n_vocab) {
    char head[200], *body = NULL;
    size_t len;
    FILE *out = open_memstream(&body, &len);
    if (!out) return fail("no memory");
    fprintf(out, "{\"prompt\":[");
    for (int32_t i = 0; i < n_prompt; i++)
        fprintf(out, "%s%d", i ? "," : "", bench_token(request, i, n_vocab));
    fprintf(out,
            "],\"max_tokens\":%d,\"ignore_eos\":true,\"stream\":true,\"temperature\":0,"
            "\"cache_prompt\":false}",
            n_tokens);
    fclose(out);
    const int n_head = snprintf(head, sizeof head,
                                "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: "
                                "application/json\r\nContent-Length: %zu\r\n\r\n",
                                len);
    errno = 0;
    const bool ok = send(s->fd, head, (size_t)n_head, MSG_NOSIGNAL) == n_head &&
                    send(s->fd, body, len, MSG_NOSIGNAL) == (ssize_t)len;
    free(body);
    return ok || fail("send");
}

/* ---- the commands ---- */

static void close_all(client *c) {
    if (c->server) kill(c->server, SIGCONT);
    for (int i = 0; i < c->n; i++) close(c->streams[i].fd);
    c->n = 0;
}

static bool open_all(client *c, int port, int n, int n_prompt, int n_tokens, int n_vocab) {
    const struct sockaddr_in address = {.sin_family = AF_INET,
                                        .sin_port = htons((uint16_t)port),
                                        .sin_addr = {.s_addr = htonl(INADDR_LOOPBACK)}};
    while (c->n < n) {
        stream *s = &c->streams[c->n];
        *s = (stream){.fd = socket(AF_INET, SOCK_STREAM, 0)};
        errno = 0;
        if (s->fd < 0) return fail("socket");
        c->n++;
        if (connect(s->fd, (const struct sockaddr *)&address, sizeof address)) return fail("connect");
        if (!send_request(s, c->n - 1, n_prompt, n_tokens, n_vocab)) return false;
    }
    for (int i = 0; i < n; i++)
        if (!wait_for(&c->streams[i], 1)) return false;
    kill(c->server, SIGSTOP);
    printf("{\"done\": %lld}\n", (long long)c->streams[0].n_tokens);
    return fflush(stdout) == 0;
}

static double cpu_seconds(const client *c) {
    clockid_t server;
    if (clock_getcpuclockid(c->server, &server)) return 0;
    return bench_seconds(server) + bench_seconds(CLOCK_PROCESS_CPUTIME_ID);
}

/* A part of the time until NEAR tokens before the end, at the pace so far, which the token that is being made
 * counts for: a round that is slept through is lost. */
static void nap(int64_t n_made, int64_t n_left, double seconds) {
    double ns = FIRST_NAP_NS;
    if (n_made > 0) ns = 0.7e9 * seconds / (double)(n_made + 1) * (double)(n_left - NEAR);
    nanosleep(&(struct timespec){.tv_nsec = ns < NAP_NS ? (long)ns : NAP_NS}, NULL);
}

/* at: [n_tokens + 1] when how many of them had come; *n_at: how many times there are; *slept: the end came
 * during a nap. */
static bool run_first(stream *first, int n_tokens, bool watches, double *at, int *n_at, bool *slept) {
    const int64_t begin = first->n_tokens, end = begin + n_tokens;
    *n_at = 0;
    at[(*n_at)++] = bench_seconds(CLOCK_MONOTONIC);
    while (!watches && first->n_tokens + NEAR < end) {
        nap(first->n_tokens - begin, end - first->n_tokens, bench_seconds(CLOCK_MONOTONIC) - at[0]);
        if (!take(first, false)) return false;
    }
    *slept = first->n_tokens >= end;
    if (*slept) at[(*n_at)++] = bench_seconds(CLOCK_MONOTONIC);
    while (first->n_tokens < end) {
        if (!wait_for(first, first->n_tokens + 1)) return false;
        at[(*n_at)++] = bench_seconds(CLOCK_MONOTONIC);
    }
    return true;
}

static bool run_round(client *c, int n_tokens, bool watches) {
    static double at[ROUND_MAX + 1];
    stream *first = &c->streams[0];
    int n_at;
    bool slept;
    for (int i = 0; i < c->n; i++)
        if (!take(&c->streams[i], false)) return false;
    kill(c->server, SIGCONT);
    if (!wait_for(first, first->n_tokens + WARM)) return false;
    const int64_t begin = first->n_tokens;
    const double cpu = cpu_seconds(c);
    if (!run_first(first, n_tokens, watches, at, &n_at, &slept)) return false;
    const double cpu_end = cpu_seconds(c);
    kill(c->server, SIGSTOP);
    for (int i = 1; i < c->n; i++)
        if (!take(&c->streams[i], false)) return false;
    printf("{\"done\": %lld, \"tokens\": %lld, \"seconds\": %.6f, \"cpu_seconds\": %.6f, \"gaps\": [",
           (long long)first->n_tokens, (long long)(first->n_tokens - begin) * c->n, at[n_at - 1] - at[0],
           slept ? 0 : cpu_end - cpu);
    for (int i = 1; watches && i < n_at; i++) printf("%s%.6f", i > 1 ? ", " : "", at[i] - at[i - 1]);
    puts("]}");
    return fflush(stdout) == 0;
}

static bool n_tokens_of(const char *line, int *n) {
    return (sscanf(line, "round %d", n) == 1 || sscanf(line, "watch %d", n) == 1) && *n >= 1 &&
           *n <= ROUND_MAX;
}

int main(void) {
    static client c;
    char line[200];
    bool ok = true;
    while (ok && fgets(line, sizeof line, stdin)) {
        int pid, port, n, n_prompt, n_tokens, n_vocab;
        errno = 0;
        if (sscanf(line, "open %d %d %d %d %d %d", &pid, &port, &n, &n_prompt, &n_tokens, &n_vocab) == 6 &&
            n >= 1 && n <= STREAMS_MAX) {
            close_all(&c);
            c.server = pid;
            ok = open_all(&c, port, n, n_prompt, n_tokens, n_vocab);
        } else if (c.n && n_tokens_of(line, &n_tokens)) {
            ok = run_round(&c, n_tokens, line[0] == 'w');
        } else {
            ok = fail("none of the commands at the head of bench/bench_serve.c");
        }
    }
    close_all(&c);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
