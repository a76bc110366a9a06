# Finds ggml and says how it was built: PAGED_GGML_LIBDIR, PAGED_GGML_BUILD (text), PAGED_BUILD_CPU_FLAGS (the bits of
# paged_cpu_flags() that its code needs).

find_package(ggml CONFIG)
if(NOT ggml_FOUND)
    message(FATAL_ERROR "ggml was not found. Give -Dggml_DIR=<folder of ggml-config.cmake>, use ./x build, which builds it, "
                        "or -DPAGED_ENGINE=OFF for libpaged alone.")
endif()
get_target_property(PAGED_GGML_LIBDIR ggml::ggml LOCATION)
get_filename_component(PAGED_GGML_LIBDIR "${PAGED_GGML_LIBDIR}" DIRECTORY)
# The Python package's build leaves broken, relative run paths here ("$/../libggml/lib").
set_target_properties(ggml::ggml PROPERTIES INTERFACE_LINK_OPTIONS "")

# find_package leaves ggml_VERSION and the options empty when ggmlConfig.cmake is met first, so they are read as text.
set(ggml_options "")
if(EXISTS "${ggml_DIR}/ggml-config.cmake")
    file(STRINGS "${ggml_DIR}/ggml-config.cmake" ggml_options REGEX "^set\\(GGML_")
endif()
macro(paged_ggml_option name)
    set(GGML_OPT_${name} "")
    if(ggml_options MATCHES "set\\(GGML_${name} \"([^\"]*)\"\\)")
        set(GGML_OPT_${name} "${CMAKE_MATCH_1}")
    endif()
endmacro()
foreach(option IN ITEMS VERSION NATIVE LLAMAFILE OPENMP_ENABLED AVX2 AVX512 AVX512_BF16 AVX512_VNNI)
    paged_ggml_option(${option})
endforeach()
string(CONCAT PAGED_GGML_BUILD "ggml ${GGML_OPT_VERSION}, native ${GGML_OPT_NATIVE}, llamafile ${GGML_OPT_LLAMAFILE}, "
                               "openmp ${GGML_OPT_OPENMP_ENABLED}")
message(STATUS "${PAGED_GGML_BUILD}: ${PAGED_GGML_LIBDIR}")
if(GGML_OPT_LLAMAFILE STREQUAL "ON" OR GGML_OPT_OPENMP_ENABLED STREQUAL "ON")
    message(WARNING "This ggml has llamafile's GEMM or OpenMP switched on: results may differ in their last bits with the "
                    "batch, and threads are not the engine's own. Build it with -DGGML_LLAMAFILE=OFF -DGGML_OPENMP=OFF.")
endif()

# A native ggml needs what this machine has; the program compares at its start and says so instead of dying of SIGILL.
set(PAGED_BUILD_CPU_FLAGS 0)
if(is_x86)
    set(macros "")
    if(GGML_OPT_NATIVE STREQUAL "ON")
        execute_process(COMMAND ${CMAKE_C_COMPILER} -march=native -dM -E -x c /dev/null OUTPUT_VARIABLE macros)
    endif()
    set(bit 1)
    foreach(name IN ITEMS AVX2 AVX512:F AVX512_BF16:BF16 AVX512_VNNI:VNNI)
        string(REGEX MATCH "^([A-Z0-9_]+):?(.*)$" _ ${name})
        set(option ${CMAKE_MATCH_1})
        set(feature "${CMAKE_MATCH_2}")
        string(REGEX REPLACE "_.*" "" family ${option})
        if(macros MATCHES "__${family}${feature}__" OR GGML_OPT_${option} STREQUAL "ON")
            math(EXPR PAGED_BUILD_CPU_FLAGS "${PAGED_BUILD_CPU_FLAGS} | ${bit}")
        endif()
        math(EXPR bit "${bit} << 1")
    endforeach()
endif()
