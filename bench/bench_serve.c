/* bench/bench_serve.c: a client of servers that costs next to nothing, so that they are what is measured.
 * bench_serve.py drives it; see there what is asked for.
 *
 *     open PID PORT N PROMPT TOKENS VOCAB    close what is open; N streams of PROMPT prompt tokens and TOKENS
 *                                            tokens each, until each of them has begun
 *     round N P                              N more tokens of everything that is open, P times: its parts
 *     watch N P                              the same, and the time between any two of the first stream
 *
 * Between two commands the server is stopped (SIGSTOP), so that several of them and the bare engine take
 * turns within a fraction of a second, in the middle of their streams. A round begins with the twelfth token
 * after the stop, when threads have found their cores again, which no server in use has to do. Each part
 * begins where the one before ended and goes to the N-th token that follows, as it comes. Before that the
 * client sleeps, since it would run on the server's cores: at the pace so far, and almost to the end. A part
 * whose end it slept through says that it took no CPU time, so that it does not count, and the next one
 * begins with the next token. `watch` looks at each token.
 * Only the first stream is looked at: the tokens of the others come in the same steps.
 *
 *     {"done": tokens of the first stream so far, "tokens": of all streams, "seconds": wall, "cpu_seconds":
 *      of the server and of this program, "parts": [[tokens, seconds, cpu_seconds], …], "gaps": [of
 *      each part of a watch, [seconds between two tokens, …]]}
 *
 * Errors: one line on stderr, status 1.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include "bench/protocol.h"

enum {
    STREAMS_MAX = 64,
    TOKENS_MAX = 1024, /* of a part */
    TIMEOUT_MS = 60000,
    WARM = 12 /* tokens; of bench_serve.py as well */
};

static const double NEAR = 0.7; /* tokens before the end */

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
    double pace; /* seconds between two tokens; the fastest part of the round so far */
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

typedef struct part {
    int64_t n_tokens; /* of the first stream */
    double seconds, cpu_seconds;
    int n_gaps;
} part;

/* Until n_tokens have almost come. */
static void sleep_near(const client *c, int n_tokens) {
    const double seconds = c->pace * (n_tokens - NEAR), whole = floor(seconds);
    const struct timespec nap = {.tv_sec = (time_t)whole, .tv_nsec = (long)((seconds - whole) * 1e9)};
    if (seconds > 0) nanosleep(&nap, NULL);
}

/* gaps: [n_tokens] the time between any two tokens; NULL: nobody wants them. */
static bool run_part(client *c, int n_tokens, part *p, double *gaps) {
    stream *first = &c->streams[0];
    const int64_t begin = first->n_tokens, end = begin + n_tokens;
    const double start = bench_seconds(CLOCK_MONOTONIC), cpu = cpu_seconds(c);
    double last = start;
    int n_gaps = 0;
    if (!gaps) {
        sleep_near(c, n_tokens);
        if (!take(first, false)) return false;
    }
    const bool slept = first->n_tokens >= end;
    while (first->n_tokens < end) {
        if (!wait_for(first, first->n_tokens + 1)) return false;
        const double now = bench_seconds(CLOCK_MONOTONIC);
        if (gaps) gaps[n_gaps++] = now - last;
        last = now;
    }
    if (slept) last = bench_seconds(CLOCK_MONOTONIC);
    *p = (part){first->n_tokens - begin, last - start, slept ? 0 : cpu_seconds(c) - cpu, n_gaps};
    c->pace = fmin(c->pace, p->seconds / (double)p->n_tokens);
    return !slept || wait_for(first, first->n_tokens + 1);
}

static void print_round(const client *c, const part *parts, int n_parts, const double *gaps, int n_tokens) {
    part all = {0};
    for (int i = 0; i < n_parts; i++) {
        all.n_tokens += parts[i].n_tokens;
        all.seconds += parts[i].seconds;
        all.cpu_seconds += parts[i].cpu_seconds;
    }
    printf("{\"done\": %lld, \"tokens\": %lld, \"seconds\": %.6f, \"cpu_seconds\": %.6f, \"parts\": [",
           (long long)c->streams[0].n_tokens, (long long)all.n_tokens * c->n, all.seconds, all.cpu_seconds);
    for (int i = 0; i < n_parts; i++)
        printf("%s[%lld, %.6f, %.6f]", i ? ", " : "", (long long)parts[i].n_tokens * c->n, parts[i].seconds,
               parts[i].cpu_seconds);
    fputs("], \"gaps\": [", stdout);
    for (int i = 0; gaps && i < n_parts; i++) {
        printf("%s[", i ? ", " : "");
        for (int j = 0; j < parts[i].n_gaps; j++) printf("%s%.6f", j ? ", " : "", gaps[i * n_tokens + j]);
        putchar(']');
    }
    puts("]}");
}

/* The pace is that of the second half. */
static bool warm_up(client *c) {
    stream *first = &c->streams[0];
    if (!wait_for(first, first->n_tokens + WARM / 2)) return false;
    const double start = bench_seconds(CLOCK_MONOTONIC);
    const int64_t begin = first->n_tokens;
    if (!wait_for(first, begin + WARM / 2)) return false;
    c->pace = (bench_seconds(CLOCK_MONOTONIC) - start) / (double)(first->n_tokens - begin);
    return true;
}

static bool run_round(client *c, int n_tokens, int n_parts, bool watches) {
    static double gaps[BENCH_PARTS_MAX * TOKENS_MAX];
    part parts[BENCH_PARTS_MAX];
    for (int i = 0; i < c->n; i++)
        if (!take(&c->streams[i], false)) return false;
    kill(c->server, SIGCONT);
    if (!warm_up(c)) return false;
    for (int i = 0; i < n_parts; i++)
        if (!run_part(c, n_tokens, &parts[i], watches ? gaps + i * n_tokens : NULL)) return false;
    kill(c->server, SIGSTOP);
    for (int i = 1; i < c->n; i++)
        if (!take(&c->streams[i], false)) return false;
    print_round(c, parts, n_parts, watches ? gaps : NULL, n_tokens);
    return fflush(stdout) == 0;
}

static bool read_round(const char *line, int *n_tokens, int *n_parts) {
    return (sscanf(line, "round %d %d", n_tokens, n_parts) == 2 ||
            sscanf(line, "watch %d %d", n_tokens, n_parts) == 2) &&
           *n_tokens >= 1 && *n_tokens <= TOKENS_MAX && *n_parts >= 1 && *n_parts <= BENCH_PARTS_MAX;
}

int main(void) {
    static client c;
    char line[200];
    bool ok = true;
    while (ok && fgets(line, sizeof line, stdin)) {
        int pid, port, n, n_prompt, n_tokens, n_vocab, n_parts;
        errno = 0;
        if (sscanf(line, "open %d %d %d %d %d %d", &pid, &port, &n, &n_prompt, &n_tokens, &n_vocab) == 6 &&
            n >= 1 && n <= STREAMS_MAX) {
            close_all(&c);
            c.server = pid;
            ok = open_all(&c, port, n, n_prompt, n_tokens, n_vocab);
        } else if (c.n && read_round(line, &n_tokens, &n_parts)) {
            ok = run_round(&c, n_tokens, n_parts, line[0] == 'w');
        } else {
            ok = fail("none of the commands at the head of bench/bench_serve.c");
        }
    }
    close_all(&c);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}
