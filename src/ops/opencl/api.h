/* opencl/api.h: the part of the binary interface of OpenCL 1.2 that we use, and where its functions are.
 * libOpenCL.so.1 is opened when a device is asked for: nothing links to it, nothing needs its headers, and
 * without it all else works. Names are those of the standard (Khronos, The OpenCL Specification 1.2), values
 * too.
 */
#ifndef PAGED_OPS_OPENCL_API_H
#define PAGED_OPS_OPENCL_API_H

#include <stddef.h>
#include <stdint.h>

typedef struct _cl_platform_id *cl_platform_id;
typedef struct _cl_device_id *cl_device_id;
typedef struct _cl_context *cl_context;
typedef struct _cl_command_queue *cl_command_queue;
typedef struct _cl_mem *cl_mem;
typedef struct _cl_program *cl_program;
typedef struct _cl_kernel *cl_kernel;
typedef struct _cl_event *cl_event;

enum {
    CL_SUCCESS = 0,
    CL_DEVICE_NOT_FOUND = -1,
    CL_MEM_OBJECT_ALLOCATION_FAILURE = -4,
    CL_OUT_OF_RESOURCES = -5,
    CL_OUT_OF_HOST_MEMORY = -6,
    CL_INVALID_BUFFER_SIZE = -61,
    CL_FALSE = 0,
    CL_TRUE = 1,
    CL_PLATFORM_VERSION = 0x0901,
    CL_PLATFORM_NAME = 0x0902,
    CL_DEVICE_TYPE = 0x1000,
    CL_DEVICE_MAX_COMPUTE_UNITS = 0x1002,
    CL_DEVICE_ADDRESS_BITS = 0x100d,
    CL_DEVICE_MAX_MEM_ALLOC_SIZE = 0x1010,
    CL_DEVICE_SINGLE_FP_CONFIG = 0x101b,
    CL_DEVICE_GLOBAL_MEM_SIZE = 0x101f,
    CL_DEVICE_ENDIAN_LITTLE = 0x1026,
    CL_DEVICE_AVAILABLE = 0x1027,
    CL_DEVICE_COMPILER_AVAILABLE = 0x1028,
    CL_DEVICE_NAME = 0x102b,
    CL_DRIVER_VERSION = 0x102d,
    CL_PROGRAM_BINARY_SIZES = 0x1165,
    CL_PROGRAM_BINARIES = 0x1166,
    CL_PROGRAM_BUILD_LOG = 0x1183,
    CL_EVENT_COMMAND_EXECUTION_STATUS = 0x11d3,
    CL_COMPLETE = 0,
    CL_DEVICE_TYPE_CPU = 1 << 1,
    CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT = 1 << 7,
    CL_MEM_READ_WRITE = 1 << 0
};
#define CL_DEVICE_TYPE_ALL ((uint64_t)0xffffffff)

/* result, name without cl, parameters */
#define PAGED__CL_FUNCTIONS(X)                                                                               \
    X(int32_t, GetPlatformIDs, (uint32_t, cl_platform_id *, uint32_t *))                                     \
    X(int32_t, GetPlatformInfo, (cl_platform_id, uint32_t, size_t, void *, size_t *))                        \
    X(int32_t, GetDeviceIDs, (cl_platform_id, uint64_t, uint32_t, cl_device_id *, uint32_t *))               \
    X(int32_t, GetDeviceInfo, (cl_device_id, uint32_t, size_t, void *, size_t *))                            \
    X(cl_context, CreateContext,                                                                             \
      (const intptr_t *, uint32_t, const cl_device_id *,                                                     \
       void (*)(const char *, const void *, size_t, void *), void *, int32_t *))                             \
    X(int32_t, ReleaseContext, (cl_context))                                                                 \
    X(cl_command_queue, CreateCommandQueue, (cl_context, cl_device_id, uint64_t, int32_t *))                 \
    X(int32_t, ReleaseCommandQueue, (cl_command_queue))                                                      \
    X(int32_t, Flush, (cl_command_queue))                                                                    \
    X(int32_t, Finish, (cl_command_queue))                                                                   \
    X(cl_mem, CreateBuffer, (cl_context, uint64_t, size_t, void *, int32_t *))                               \
    X(int32_t, ReleaseMemObject, (cl_mem))                                                                   \
    X(cl_program, CreateProgramWithSource, (cl_context, uint32_t, const char **, const size_t *, int32_t *)) \
    X(cl_program, CreateProgramWithBinary,                                                                   \
      (cl_context, uint32_t, const cl_device_id *, const size_t *, const unsigned char **, int32_t *,        \
       int32_t *))                                                                                           \
    X(int32_t, BuildProgram,                                                                                 \
      (cl_program, uint32_t, const cl_device_id *, const char *, void (*)(cl_program, void *), void *))      \
    X(int32_t, GetProgramInfo, (cl_program, uint32_t, size_t, void *, size_t *))                             \
    X(int32_t, GetProgramBuildInfo, (cl_program, cl_device_id, uint32_t, size_t, void *, size_t *))          \
    X(int32_t, ReleaseProgram, (cl_program))                                                                 \
    X(cl_kernel, CreateKernel, (cl_program, const char *, int32_t *))                                        \
    X(int32_t, ReleaseKernel, (cl_kernel))                                                                   \
    X(int32_t, SetKernelArg, (cl_kernel, uint32_t, size_t, const void *))                                    \
    X(int32_t, EnqueueNDRangeKernel,                                                                         \
      (cl_command_queue, cl_kernel, uint32_t, const size_t *, const size_t *, const size_t *, uint32_t,      \
       const cl_event *, cl_event *))                                                                        \
    X(int32_t, EnqueueReadBuffer,                                                                            \
      (cl_command_queue, cl_mem, uint32_t, size_t, size_t, void *, uint32_t, const cl_event *, cl_event *))  \
    X(int32_t, EnqueueWriteBuffer,                                                                           \
      (cl_command_queue, cl_mem, uint32_t, size_t, size_t, const void *, uint32_t, const cl_event *,         \
       cl_event *))                                                                                          \
    X(int32_t, EnqueueReadBufferRect,                                                                        \
      (cl_command_queue, cl_mem, uint32_t, const size_t *, const size_t *, const size_t *, size_t, size_t,   \
       size_t, size_t, void *, uint32_t, const cl_event *, cl_event *))                                      \
    X(int32_t, EnqueueCopyBuffer,                                                                            \
      (cl_command_queue, cl_mem, cl_mem, size_t, size_t, size_t, uint32_t, const cl_event *, cl_event *))    \
    X(cl_event, CreateUserEvent, (cl_context, int32_t *))                                                    \
    X(int32_t, SetUserEventStatus, (cl_event, int32_t))                                                      \
    X(int32_t, GetEventInfo, (cl_event, uint32_t, size_t, void *, size_t *))                                 \
    X(int32_t, WaitForEvents, (uint32_t, const cl_event *))                                                  \
    X(int32_t, RetainEvent, (cl_event))                                                                      \
    X(int32_t, ReleaseEvent, (cl_event))

typedef struct paged__cl_api {
#define PAGED__CL_MEMBER(result, name, parameters) result(*name) parameters;
    PAGED__CL_FUNCTIONS(PAGED__CL_MEMBER)
#undef PAGED__CL_MEMBER
} paged__cl_api;

/* Opened once, never closed: drivers do not bear to be unloaded. NULL: *why says what is missing. Safe from
 * any thread. */
const paged__cl_api *paged__cl_api_open(const char **why);

/* "CL_OUT_OF_RESOURCES" …; static */
const char *paged__cl_error_name(int32_t error);

#endif
