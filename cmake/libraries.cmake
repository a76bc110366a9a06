# The rooms of src/ and what they are put together to.
#
# A room is compiled once, into room-<name>. From the objects come the libraries that are installed (libpaged,
# libpaged-engine) and static variants of the same objects (paged-static, paged-engine-static), which the program, the tests
# and the benches link, since they may reach inside.

set(is_x86 FALSE)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|amd64|AMD64)$")
    set(is_x86 TRUE)
endif()

# paged_room(NAME [LIBRARY…]): compiles src/NAME; the libraries are given for their headers. An empty room is no target.
function(paged_room name)
    file(GLOB_RECURSE sources CONFIGURE_DEPENDS RELATIVE ${PROJECT_SOURCE_DIR} ${PROJECT_SOURCE_DIR}/src/${name}/*.c)
    if(NOT is_x86)
        list(FILTER sources EXCLUDE REGEX "^src/[^/]+/(avx|amx)[^/]*/")
    endif()
    if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
        list(FILTER sources EXCLUDE REGEX "^src/[^/]+/neon[^/]*/")
    endif()
    if(NOT sources)
        return()
    endif()
    add_library(room-${name} OBJECT ${sources})
    target_include_directories(room-${name} PRIVATE ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
    target_link_libraries(room-${name} PRIVATE ${ARGN})
    # Only the ISA folders get ISA flags; all the rest runs on every machine of the architecture. Their unrolled loops cost UBSan two
    # minutes a file with a check of every sum of a pointer; ASan sees a step too far all the same.
    set(isa_avx2 -mavx2 -mfma -mf16c -mbmi2)
    set(isa_avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl ${isa_avx2})
    set(isa_avx512_vnni -mavx512vnni ${isa_avx512})
    set(isa_avx512_bf16 -mavx512bf16 ${isa_avx512_vnni})
    set(isa_amx -mamx-tile -mamx-int8 -mamx-bf16 -mavx512fp16 -mavx512vbmi ${isa_avx512_bf16})
    set(isa_neon_dot -march=armv8.2-a+dotprod)
    foreach(source IN LISTS sources)
        if(source MATCHES "^src/[^/]+/(avx2|avx512|avx512_vnni|avx512_bf16|amx|neon_dot)/")
            set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS "${isa_${CMAKE_MATCH_1}};-fno-sanitize=pointer-overflow")
        endif()
    endforeach()
endfunction()

# paged_rooms(OUT NAME…): the objects of the rooms that exist.
function(paged_rooms out)
    set(objects "")
    foreach(name IN LISTS ARGN)
        if(TARGET room-${name})
            list(APPEND objects $<TARGET_OBJECTS:room-${name}>)
        endif()
    endforeach()
    set(${out} "${objects}" PARENT_SCOPE)
endfunction()

# paged_library(TARGET STATIC_TARGET OUTPUT_NAME EXPORT_NAME ROOM…): the installed library and its static variant.
function(paged_library target static_target output_name export_name)
    paged_rooms(objects ${ARGN})
    add_library(${target} ${objects})
    add_library(${static_target} STATIC ${objects})
    foreach(each IN ITEMS ${target} ${static_target})
        # The objects carry no target that would tell the language.
        set_target_properties(${each} PROPERTIES LINKER_LANGUAGE C)
        target_include_directories(${each} PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>
                                                  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
        target_link_libraries(${each} PRIVATE m Threads::Threads ${CMAKE_DL_LIBS})
    endforeach()
    set_target_properties(${target} PROPERTIES OUTPUT_NAME ${output_name} EXPORT_NAME ${export_name}
                          VERSION ${PROJECT_VERSION} SOVERSION ${soversion})
    if(NOT BUILD_SHARED_LIBS)
        target_compile_definitions(${target} INTERFACE PAGED_STATIC)
    endif()
    add_library(paged::${export_name} ALIAS ${target})
endfunction()

# Before 1.0 every minor version may break the ABI, so the soname carries it.
set(soversion ${PROJECT_VERSION_MAJOR})
if(PROJECT_VERSION_MAJOR EQUAL 0)
    set(soversion 0.${PROJECT_VERSION_MINOR})
endif()

# xxHash is inlined from its header, so that it is nobody's link dependency.
find_path(XXHASH_INCLUDE_DIR xxhash.h REQUIRED)

paged_room(base)
paged_room(mem)
if(TARGET room-mem)
    target_include_directories(room-mem SYSTEM PRIVATE ${XXHASH_INCLUDE_DIR})
endif()
paged_room(ops)
# What the device runs is compiled there; it travels inside the library.
set(cl_source ${PROJECT_SOURCE_DIR}/src/ops/opencl/kernels.cl)
set(cl_file ${PROJECT_BINARY_DIR}/opencl_source.c)
add_custom_command(OUTPUT ${cl_file}
                   COMMAND ${CMAKE_COMMAND} -DFILE=${cl_source} -DNAME=paged__cl_source -DHEADER=ops/opencl/cl.h -DOUT=${cl_file}
                           -P ${PROJECT_SOURCE_DIR}/cmake/embed_text.cmake
                   DEPENDS ${cl_source} ${PROJECT_SOURCE_DIR}/cmake/embed_text.cmake)
target_sources(room-ops PRIVATE ${cl_file})
# The engine uses the insides of base and ops (paged__…) across the border of the libraries. So these are compiled with visible
# symbols, and the version script exports them under a version that only an engine of exactly this release asks for.
foreach(room IN ITEMS base ops)
    if(TARGET room-${room})
        set_target_properties(room-${room} PROPERTIES C_VISIBILITY_PRESET default)
    endif()
endforeach()
# A fused multiply-add where the source says multiply and add would change bits between compilers.
if(TARGET room-ops)
    target_compile_options(room-ops PRIVATE -ffp-contract=off)
endif()
paged_library(libpaged paged-static paged paged base mem ops)
if(BUILD_SHARED_LIBS)
    configure_file(cmake/libpaged.map.in ${PROJECT_BINARY_DIR}/libpaged.map @ONLY)
    target_link_options(libpaged PRIVATE -Wl,--version-script=${PROJECT_BINARY_DIR}/libpaged.map)
    set_target_properties(libpaged PROPERTIES LINK_DEPENDS ${PROJECT_BINARY_DIR}/libpaged.map)
endif()

if(PAGED_ENGINE)
    include(cmake/ggml.cmake)
    find_package(PkgConfig REQUIRED)
    pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
    pkg_check_modules(JANSSON REQUIRED IMPORTED_TARGET jansson)
    pkg_check_modules(EDIT REQUIRED IMPORTED_TARGET libedit)
    pkg_check_modules(EVENT REQUIRED IMPORTED_TARGET libevent_core)
    pkg_check_modules(SQLITE REQUIRED IMPORTED_TARGET sqlite3)
    pkg_check_modules(HIREDIS REQUIRED IMPORTED_TARGET hiredis)

    paged_room(model ggml::ggml PkgConfig::PCRE2)
    paged_room(engine ggml::ggml)
    target_include_directories(room-engine SYSTEM PRIVATE ${XXHASH_INCLUDE_DIR})
    paged_room(store PkgConfig::SQLITE PkgConfig::HIREDIS)
    target_include_directories(room-store SYSTEM PRIVATE ${XXHASH_INCLUDE_DIR})
    paged_room(server ggml::ggml PkgConfig::JANSSON PkgConfig::EVENT)
    # The files that the server gives out, and those that a dump takes along, are a part of the program.
    function(paged_embed room header list)
        file(GLOB static_files CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/src/${room}/static/*)
        set(out ${PROJECT_BINARY_DIR}/static_${room}.c)
        add_custom_command(OUTPUT ${out}
                           COMMAND ${CMAKE_COMMAND} -DFOLDER=${PROJECT_SOURCE_DIR}/src/${room}/static -DHEADER=${header}
                                   -DLIST=${list} -DOUT=${out} -P ${PROJECT_SOURCE_DIR}/cmake/embed.cmake
                           DEPENDS ${static_files} ${PROJECT_SOURCE_DIR}/cmake/embed.cmake)
        target_sources(room-${room} PRIVATE ${out})
    endfunction()
    paged_embed(server server/route.h paged__files)
    paged_room(cli PkgConfig::JANSSON PkgConfig::EDIT)
    paged_embed(cli cli/ascend.h paged__dump_files)
    foreach(room IN ITEMS model engine cli)
        if(TARGET room-${room})
            target_compile_definitions(room-${room} PRIVATE PAGED_GGML_BUILD="${PAGED_GGML_BUILD}"
                                                            PAGED_BUILD_CPU_FLAGS=${PAGED_BUILD_CPU_FLAGS}u)
        endif()
    endforeach()

    paged_rooms(engine_objects model engine)
    if(engine_objects)
        paged_library(libpaged-engine paged-engine-static paged-engine engine model engine)
        target_link_libraries(libpaged-engine PUBLIC libpaged PRIVATE ggml::ggml PkgConfig::PCRE2)
        target_link_libraries(paged-engine-static PUBLIC paged-static PRIVATE ggml::ggml PkgConfig::PCRE2)
        set_target_properties(libpaged-engine PROPERTIES INSTALL_RPATH "$ORIGIN;${PAGED_GGML_LIBDIR}")
    endif()

    # Stores know records and no engine, so whoever embeds libpaged alone may use them too.
    paged_library(libpaged-store paged-store-static paged-store store store)
    target_link_libraries(libpaged-store PUBLIC libpaged PRIVATE PkgConfig::SQLITE PkgConfig::HIREDIS)
    target_link_libraries(paged-store-static PUBLIC paged-static PRIVATE PkgConfig::SQLITE PkgConfig::HIREDIS)
    set_target_properties(libpaged-store PROPERTIES INSTALL_RPATH "$ORIGIN")

    # The server is a part of the program and of tests that reach inside; it is not installed.
    paged_rooms(server_objects server)
    add_library(paged-server-static STATIC ${server_objects})
    set_target_properties(paged-server-static PROPERTIES LINKER_LANGUAGE C)
    target_link_libraries(paged-server-static PUBLIC paged-engine-static paged-store-static PkgConfig::JANSSON
                                                   PkgConfig::EVENT)

    paged_rooms(cli_objects cli)
    add_executable(paged ${cli_objects})
    set_target_properties(paged PROPERTIES LINKER_LANGUAGE C INSTALL_RPATH "${PAGED_GGML_LIBDIR}")
    target_link_libraries(paged PRIVATE paged-server-static PkgConfig::EDIT m)
endif()
