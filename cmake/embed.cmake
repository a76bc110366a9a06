# Writes the files of src/server/static/ into a C file, as the list paged__files of server/route.h:
#
#   cmake -DFOLDER=… -DOUT=… -P embed.cmake
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
file(CONFIGURE OUTPUT ${OUT} CONTENT "#include \"server/route.h\"\n\n@arrays@\nconst paged__file paged__files[] = {\n@rows@    {0, 0, 0}};\n" @ONLY)
