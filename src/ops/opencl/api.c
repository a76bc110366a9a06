/* opencl/api.c: finds the functions of api.h in libOpenCL.so.1, the loader that knows the drivers of a
 * machine. */
#include "ops/opencl/api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static paged__cl_api api;
static const char *missing; /* NULL: all is there */

static void open_library(void) {
    void *library = dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        missing = "libOpenCL.so.1";
        return;
    }
    /* dlsym gives a pointer to an object; C has no cast from that to a function. */
#define FIND(result, name, parameters)                                                                       \
    {                                                                                                        \
        void *found = dlsym(library, "cl" #name);                                                            \
        if (!found) missing = "cl" #name;                                                                    \
        memcpy(&api.name, &found, sizeof found);                                                             \
    }
    PAGED__CL_FUNCTIONS(FIND)
#undef FIND
}

const paged__cl_api *paged__cl_api_open(const char **why) {
    pthread_once(&once, open_library);
    if (why) *why = missing;
    return missing ? NULL : &api;
}

const char *paged__cl_error_name(int32_t error) {
    switch (error) {
    case CL_DEVICE_NOT_FOUND:
        return "CL_DEVICE_NOT_FOUND";
    case CL_MEM_OBJECT_ALLOCATION_FAILURE:
        return "CL_MEM_OBJECT_ALLOCATION_FAILURE";
    case CL_OUT_OF_RESOURCES:
        return "CL_OUT_OF_RESOURCES";
    case CL_OUT_OF_HOST_MEMORY:
        return "CL_OUT_OF_HOST_MEMORY";
    case CL_INVALID_BUFFER_SIZE:
        return "CL_INVALID_BUFFER_SIZE";
    default:
        return "error";
    }
}
