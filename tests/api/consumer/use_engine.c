/* use_engine.c: a stranger's program over the installed libpaged-engine: links it and gets a clear error for
 * a missing file. */
#include <paged/engine.h>
#include <stdio.h>

int main(void) {
    paged_error err = {0};
    paged_model *model = NULL;
    paged_status status = paged_model_load("/no/such/model.gguf", NULL, &model, &err);
    if (status != PAGED_ERR_IO || model) return 1;
    paged_model_free(model);
    printf("%s: %s\n", paged_status_name(status), err.message);
    return 0;
}
