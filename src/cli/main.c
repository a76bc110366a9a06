/* cli/main.c: the program `paged`: the command table, help and version, and the check of the processor.
 *
 * This file is compiled for every machine of the architecture and runs before anything of ggml does, which is
 * built for one.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>

#include "base/base.h"
#include "cli/cli.h"

#ifndef PAGED_BUILD_CPU_FLAGS
#define PAGED_BUILD_CPU_FLAGS 0u
#endif
#ifndef PAGED_GGML_BUILD
#define PAGED_GGML_BUILD "ggml"
#endif

static const paged__command *const commands[] = {
    &paged__command_run,     &paged__command_chat, &paged__command_serve,      &paged__command_batch,
    &paged__command_bench,   &paged__command_plan, &paged__command_perplexity, &paged__command_tokenize,
    &paged__command_inspect, &paged__command_store};
enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

/* What the processor has, as bits of paged_cpu_flags(). That function may not be asked: it respects
 * PAGED_CPU, which chooses among our kernels and says nothing about what ggml needs. */
static uint32_t cpu_flags(void) {
    uint32_t flags = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
        flags |= PAGED_CPU_AVX2;
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        flags |= PAGED_CPU_AVX512;
    }
    if (__builtin_cpu_supports("avx512bf16")) flags |= PAGED_CPU_AVX512_BF16;
    if (__builtin_cpu_supports("avx512vnni")) flags |= PAGED_CPU_AVX512_VNNI;
#endif
    return flags;
}

/* False: this processor lacks what the build needs, and it has been told. */
static bool check_cpu(paged__cli *cli) {
    static const char *const names[] = {"AVX2", "AVX-512", "AVX-512 BF16", "AVX-512 VNNI"};
    uint32_t lacking = (uint32_t)PAGED_BUILD_CPU_FLAGS & ~cpu_flags();
    char list[64] = "";
    for (uint32_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        size_t len = strlen(list);
        if (lacking & (1u << i)) snprintf(list + len, sizeof list - len, "%s%s", len ? ", " : "", names[i]);
    }
    if (!list[0]) return true;
    paged__error(
        cli, "this program was built for a processor with %s, which this one lacks; build it on this machine",
        list);
    return false;
}

static void help(paged__cli *cli) {
    paged__out_printf(
        cli, "paged %s: runs language models with a paged KV cache\n\nUsage: paged COMMAND [options]\n\n",
        paged_version());
    for (int32_t i = 0; i < N_COMMANDS; i++) {
        paged__out_printf(cli, "  %-12s %s\n", commands[i]->name, commands[i]->purpose);
    }
    paged__out_printf(cli, "  %-12s %s\n", "help", "tell about a command: paged help run");
    paged__out_printf(cli,
                      "\n  -h, --help   this text\n  --version    versions of the program and of ggml\n"
                      "\nExample:\n  %s\n",
                      paged__command_run.example);
}

/* NULL: there is none of this name, and it has been told. */
static const paged__command *find_command(paged__cli *cli, const char *name) {
    const char *names[N_COMMANDS + 2];
    for (int32_t i = 0; i < N_COMMANDS; i++) {
        if (strcmp(commands[i]->name, name) == 0) return commands[i];
        names[i] = commands[i]->name;
    }
    names[N_COMMANDS] = name[0] == '-' ? "--help" : "help";
    names[N_COMMANDS + 1] = "--version";
    const char *what = name[0] == '-' ? "option" : "command";
    const char *nearest = paged__args_nearest(name, names, N_COMMANDS + 2);
    if (nearest)
        paged__usage_error(cli, "unknown %s '%s'; did you mean '%s'?", what, name, nearest);
    else
        paged__usage_error(cli, "unknown %s '%s'", what, name);
    return NULL;
}

static int help_command(paged__cli *cli, int argc, char **argv) {
    if (argc == 0 || strcmp(argv[0], "help") == 0) {
        help(cli);
        return PAGED__EXIT_OK;
    }
    const paged__command *command = find_command(cli, argv[0]);
    if (!command) return PAGED__EXIT_USAGE;
    paged__args_help(cli, command);
    return PAGED__EXIT_OK;
}

static int dispatch(paged__cli *cli, int argc, char **argv) {
    if (argc == 0) return paged__usage_error(cli, "no command");
    const char *word = argv[0];
    if (strcmp(word, "help") == 0) return help_command(cli, argc - 1, argv + 1);
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) return help_command(cli, 0, NULL);
    if (strcmp(word, "--version") == 0) {
        paged__out_printf(cli, "paged %s\n%s\n", paged_version(), PAGED_GGML_BUILD);
        return PAGED__EXIT_OK;
    }
    const paged__command *command = find_command(cli, word);
    if (!command) return PAGED__EXIT_USAGE;
    if (!check_cpu(cli)) return PAGED__EXIT_ERROR;
    cli->command = command->name;
    return command->run(cli, argc - 1, argv + 1);
}

int main(int argc, char **argv) {
    paged__cli cli = {0};
    /* A reader that goes away is an error of write() and not the end of the process, so that everything is
     * put away. */
    signal(SIGPIPE, SIG_IGN);
    paged__term_init(&cli.term);
    int code = argc > 0 ? dispatch(&cli, argc - 1, argv + 1) : paged__usage_error(&cli, "no command");
    return paged__out_end(&cli, code);
}
