# Cross compiling for 64-bit ARM with Debian's gcc-aarch64-linux-gnu; programs run under qemu-user.
#
#   cmake -B build/neon -G Ninja --toolchain cmake/aarch64-linux-gnu.cmake -DPAGED_ENGINE=OFF
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)

# xxHash is a header that is the same everywhere, but its folder has this machine's C library in it too.
get_property(is_probe GLOBAL PROPERTY IN_TRY_COMPILE)
if(NOT is_probe AND EXISTS /usr/include/xxhash.h)
    file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/xxhash)
    file(COPY_FILE /usr/include/xxhash.h ${CMAKE_BINARY_DIR}/xxhash/xxhash.h ONLY_IF_DIFFERENT)
    set(XXHASH_INCLUDE_DIR ${CMAKE_BINARY_DIR}/xxhash CACHE PATH "Where xxhash.h is")
endif()
