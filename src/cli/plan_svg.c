/* cli/plan_svg.c: a plan as charts. Drawn on white, so that a page in the dark shows them as well. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/plan.h"
#include "cli/planner.h"

enum { WIDTH = 720, HEIGHT = 320, LEFT = 64, RIGHT = 20, TOP = 64, BOTTOM = 54 };

/* Of the ways, in their order: the colours of docs/plots. */
static const char *const colors[PAGED_PLAN_WAYS] = {"#3d9970", "#2f6fab", "#e07b39"};

/* ASCII out of a name from a file; the five characters of XML as entities. */
static void put_text(FILE *file, const char *text) {
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '<')
            fputs("&lt;", file);
        else if (c == '>')
            fputs("&gt;", file);
        else if (c == '&')
            fputs("&amp;", file);
        else
            fputc(c >= 0x20 && c < 0x7f ? c : '?', file);
    }
}

static void label(FILE *file, double x, double y, const char *anchor, const char *text) {
    fprintf(file, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor);
    put_text(file, text);
    fputs("</text>\n", file);
}

/* The next of 1, 2, 3, 4, 5, 6, 8 and 10 × 10^n. */
static double ceiling(double value) {
    static const double steps[] = {1, 2, 3, 4, 5, 6, 8, 10};
    double power = pow(10, floor(log10(value > 0 ? value : 1)));
    int32_t i = 0;
    while (i < 7 && steps[i] * power < value) i++;
    return steps[i] * power;
}

/* Title, legend of so many ways, and a grid in fifths of y_max. */
static void frame(FILE *file, double top, const char *title, double y_max, const char *unit,
                  const bool *shown) {
    fprintf(file, "<text x=\"%d\" y=\"%.1f\" font-size=\"15\" font-weight=\"bold\">", LEFT, top + 22);
    put_text(file, title);
    fputs("</text>\n", file);
    double x = LEFT;
    for (int32_t w = 0; w < PAGED_PLAN_WAYS; w++) {
        if (!shown[w]) continue;
        const char *name = paged_plan_way_name((paged_plan_way)w);
        fprintf(file, "<rect x=\"%.1f\" y=\"%.1f\" width=\"11\" height=\"11\" fill=\"%s\"/>\n", x, top + 34,
                colors[w]);
        label(file, x + 16, top + 44, "start", name);
        x += 40 + 6.6 * (double)strlen(name);
    }
    for (int32_t i = 0; i <= 5; i++) {
        char text[32];
        double y = top + HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * i / 5.0;
        snprintf(text, sizeof text, "%.3g%s", y_max * i / 5, unit);
        fprintf(file, "<line x1=\"%d\" y1=\"%.1f\" x2=\"%d\" y2=\"%.1f\" stroke=\"%s\"/>\n", LEFT, y,
                WIDTH - RIGHT, y, i ? "#dddddd" : "#222222");
        label(file, LEFT - 8, y + 4, "end", text);
    }
}

static void waste_chart(FILE *file, const paged__planner *p) {
    static const bool shown[PAGED_PLAN_WAYS] = {[PAGED_PLAN_PAGED] = true, [PAGED_PLAN_PACKED] = true};
    double most = 0;
    for (int32_t i = 0; i < PAGED__SWEEP; i++) most = fmax(most, fmax(p->sweep[i].paged, p->sweep[i].packed));
    double y_max = ceiling(100 * most * 1.05), span = (WIDTH - LEFT - RIGHT) / (double)PAGED__SWEEP;
    frame(file, 0, "Memory taken that holds no token, by block size", y_max, "%", shown);
    for (int32_t i = 0; i < PAGED__SWEEP; i++) {
        double middle = LEFT + span * (i + 0.5);
        char text[32];
        snprintf(text, sizeof text, "%d", p->sweep[i].block_size);
        label(file, middle, HEIGHT - BOTTOM + 18, "middle", text);
        for (int32_t w = 0; w < 2; w++) {
            double share = w ? p->sweep[i].packed : p->sweep[i].paged, x = middle + (w - 1) * 36.0;
            if (p->sweep[i].packed < 0) x = middle - 18;
            if (share < 0) continue;
            double high = (HEIGHT - TOP - BOTTOM) * 100 * share / y_max;
            fprintf(file, "<rect x=\"%.1f\" y=\"%.1f\" width=\"34\" height=\"%.1f\" fill=\"%s\"/>\n", x + 1,
                    HEIGHT - BOTTOM - high, high, colors[w ? PAGED_PLAN_PACKED : PAGED_PLAN_PAGED]);
            snprintf(text, sizeof text, "%.2g%%", 100 * share);
            label(file, x + 18, HEIGHT - BOTTOM - high - 5, "middle", text);
        }
    }
    label(file, (LEFT + WIDTH - RIGHT) / 2.0, HEIGHT - 12, "middle", "tokens of a block");
}

static void pool_chart(FILE *file, const paged__planner *p) {
    bool shown[PAGED_PLAN_WAYS];
    int64_t n_steps = 1;
    for (int32_t w = 0; w < PAGED_PLAN_WAYS; w++) {
        shown[w] = p->ways[w].fits;
        if (shown[w]) n_steps = PAGED_MAX(n_steps, p->ways[w].curve.n_steps);
    }
    double x_max = ceiling((double)n_steps), wide = WIDTH - LEFT - RIGHT, high = HEIGHT - TOP - BOTTOM;
    frame(file, HEIGHT, "The pool that holds tokens, while the load is worked off", 100, "%", shown);
    for (int32_t i = 0; i <= 5; i++) {
        char text[32];
        snprintf(text, sizeof text, "%.0f", x_max * i / 5);
        label(file, LEFT + wide * i / 5, 2 * HEIGHT - BOTTOM + 18, i == 5 ? "end" : "middle", text);
    }
    for (int32_t w = 0; w < PAGED_PLAN_WAYS; w++) {
        const paged__curve *curve = &p->ways[w].curve;
        if (!shown[w]) continue;
        /* Dashed, as packed tails lie on paged where a pool is full. */
        fprintf(file, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\"%s points=\"", colors[w],
                w == PAGED_PLAN_PACKED ? " stroke-dasharray=\"5 5\"" : "");
        for (int64_t from = 0; from < curve->n_steps; from += curve->width) {
            int64_t n = PAGED_MIN(curve->width, curve->n_steps - from);
            double share = curve->sum[from / curve->width] / (double)n / (double)p->pool_bytes;
            fprintf(file, "%.1f,%.1f ", LEFT + wide * ((double)from + (double)n / 2) / x_max,
                    2 * HEIGHT - BOTTOM - high * share);
        }
        fputs("\"/>\n", file);
    }
    label(file, LEFT + wide / 2, 2 * HEIGHT - 12, "middle", "steps");
}

int paged__planner_svg(const paged__planner *p, const char *path) {
    FILE *file = fopen(path, "we");
    if (!file) return paged__error(p->cli, "cannot write %s: %s", path, strerror(errno));
    int32_t high = p->pool_bytes ? 2 * HEIGHT : HEIGHT;
    fprintf(file,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" "
            "font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#222222\" "
            "role=\"img\">\n<title>",
            WIDTH, high, WIDTH, high);
    put_text(file, p->model);
    fprintf(file, "</title>\n<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n", WIDTH, high);
    waste_chart(file, p);
    if (p->pool_bytes) pool_chart(file, p);
    fputs("</svg>\n", file);
    bool whole = !ferror(file);
    if (fclose(file) != 0 || !whole)
        return paged__error(p->cli, "cannot write %s: %s", path, strerror(errno));
    return PAGED__EXIT_OK;
}
