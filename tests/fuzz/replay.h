/* replay.h: the main() of a fuzz target that is built without libFuzzer: runs it once over each file that is
 * given, and each file of a folder that is given. So the test suite replays the corpus with any compiler.
 */
#ifndef PAGED_TESTS_REPLAY_H
#define PAGED_TESTS_REPLAY_H

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

typedef int (*replay_fn)(const uint8_t *data, size_t n_bytes);

static int replay_file(const char *path, replay_fn run) {
    struct stat info;
    FILE *file = fopen(path, "rb");
    if (!file || fstat(fileno(file), &info) != 0) {
        perror(path);
        if (file) fclose(file);
        return 0;
    }
    uint8_t *data = malloc((size_t)info.st_size + 1);
    size_t n_bytes = data ? fread(data, 1, (size_t)info.st_size, file) : 0;
    fclose(file);
    printf("%s: %zu bytes\n", path, n_bytes);
    fflush(stdout);
    run(data, n_bytes);
    free(data);
    return 1;
}

static int replay_folder(DIR *folder, const char *path, replay_fn run) {
    int n_runs = 0;
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        char file[4096];
        if (entry->d_name[0] == '.') continue;
        if (snprintf(file, sizeof file, "%s/%s", path, entry->d_name) < (int)sizeof file)
            n_runs += replay_file(file, run);
    }
    closedir(folder);
    return n_runs;
}

/* An exit status: 0 if at least one file was run. A broken promise ends the program in `run`. */
static int replay_main(int argc, char **argv, replay_fn run) {
    int n_runs = 0;
    for (int i = 1; i < argc; i++) {
        DIR *folder = opendir(argv[i]);
        n_runs += folder ? replay_folder(folder, argv[i], run) : replay_file(argv[i], run);
    }
    printf("%d files replayed\n", n_runs);
    return n_runs == 0;
}

#endif
