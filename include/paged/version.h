/* version.h: the version of the library, the one place where it is written. CMake reads it from here. */
#ifndef PAGED_VERSION_H
#define PAGED_VERSION_H

#define PAGED_VERSION_MAJOR  0
#define PAGED_VERSION_MINOR  1
#define PAGED_VERSION_PATCH  0
#define PAGED_VERSION_STRING "0.1.0"

#endif
