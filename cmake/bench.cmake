# bench_attn_free: the program of bench/bench_attn.c over the same operators with splits of 4096 tokens instead of 512. What the
# fixed order of our sums costs is the difference between the two.
file(READ ${PROJECT_SOURCE_DIR}/include/paged/ops.h ops_header)
string(REPLACE "PAGED_ATTN_SPLIT = 512" "PAGED_ATTN_SPLIT = 4096" free_header "${ops_header}")
if(free_header STREQUAL ops_header)
    message(WARNING "include/paged/ops.h does not say PAGED_ATTN_SPLIT = 512, so that bench_attn_free is not built")
    return()
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/paged/ops.h)
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/free_split/paged/ops.h CONTENT "${free_header}" @ONLY)

get_target_property(ops_sources room-ops SOURCES)
add_executable(bench_attn_free ${PROJECT_SOURCE_DIR}/bench/bench_attn.c ${ops_sources} $<TARGET_OBJECTS:room-base>)
set_target_properties(bench_attn_free PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bench)
target_include_directories(bench_attn_free PRIVATE ${PROJECT_BINARY_DIR}/free_split ${PROJECT_SOURCE_DIR}
                                                   ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/include)
target_compile_options(bench_attn_free PRIVATE -ffp-contract=off)
target_link_libraries(bench_attn_free PRIVATE Threads::Threads m)
