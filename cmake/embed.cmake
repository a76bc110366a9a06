# Writes the files of a folder, such as src/server/static/, into a C file, as a list of the type paged__file of server/route.h:
#
#   cmake -DFOLDER=… -DHEADER=server/route.h -DLIST=paged__files -DOUT=… -P embed.cmake        HEADER declares the list
cmake_minimum_required(VERSION 3.25)
file(GLOB files RELATIVE ${FOLDER} ${FOLDER}/*)
list(SORT files)
set(arrays "")
set(rows "")
set(i 0)
foreach(name IN LISTS files)
    file(READ ${FOLDER}/${name} hex HEX)
    file(SIZE ${FOLDER}/${name} size)
    string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
    string(APPEND arrays "static const unsigned char file_${i}[] = {${bytes}0};\n")
    string(APPEND rows "    {\"/${name}\", file_${i}, ${size}},\n")
    math(EXPR i "${i} + 1")
endforeach()
file(CONFIGURE OUTPUT ${OUT} CONTENT "#include \"@HEADER@\"\n\n@arrays@\nconst paged__file @LIST@[] = {\n@rows@    {0, 0, 0}};\n" @ONLY)
