# Headers, libraries, CMake packages (paged::paged, paged::engine, paged::store), .pc files and the program.

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/paged)
foreach(name IN ITEMS version base kv mem ops plan store paged)
    install(FILES include/paged/${name}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/paged)
endforeach()
install(TARGETS libpaged EXPORT paged)
install(EXPORT paged NAMESPACE paged:: FILE paged-targets.cmake DESTINATION ${package_dir})

configure_package_config_file(cmake/paged-config.cmake.in ${PROJECT_BINARY_DIR}/paged-config.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/paged-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/paged-config.cmake ${PROJECT_BINARY_DIR}/paged-config-version.cmake
        DESTINATION ${package_dir})

# The .pc files find their prefix from where they lie, so that an installed tree can be moved.
file(RELATIVE_PATH pc_prefix "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
configure_file(cmake/paged.pc.in ${PROJECT_BINARY_DIR}/paged.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/paged.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})

if(TARGET libpaged-engine)
    foreach(name IN ITEMS model engine service conversation)
        install(FILES include/paged/${name}.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/paged)
    endforeach()
    install(TARGETS libpaged-engine EXPORT paged-engine)
    install(EXPORT paged-engine NAMESPACE paged:: FILE paged-engine-targets.cmake DESTINATION ${package_dir})
    configure_file(cmake/paged-engine.pc.in ${PROJECT_BINARY_DIR}/paged-engine.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/paged-engine.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()
if(TARGET libpaged-store)
    install(FILES include/paged/file_store.h include/paged/redis_store.h
            DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/paged)
    install(TARGETS libpaged-store EXPORT paged-store)
    install(EXPORT paged-store NAMESPACE paged:: FILE paged-store-targets.cmake DESTINATION ${package_dir})
    configure_file(cmake/paged-store.pc.in ${PROJECT_BINARY_DIR}/paged-store.pc @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/paged-store.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endif()
if(TARGET paged)
    install(TARGETS paged)
    install(FILES deploy/paged-serve.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
    install(FILES deploy/paged.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME paged)
    install(FILES deploy/grafana-dashboard.json deploy/haproxy.cfg DESTINATION ${CMAKE_INSTALL_DATADIR}/paged)
    configure_file(deploy/paged.service.in ${PROJECT_BINARY_DIR}/paged.service @ONLY)
    install(FILES ${PROJECT_BINARY_DIR}/paged.service DESTINATION lib/systemd/system)
endif()
