# Writes a text file, of ASCII, into a C file, as the array NAME and its size NAME_bytes, which HEADER declares:
#
#   cmake -DFILE=… -DNAME=… -DHEADER=… -DOUT=… -P embed_text.cmake
cmake_minimum_required(VERSION 3.25)
file(READ ${FILE} hex HEX)
file(SIZE ${FILE} size)
string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
file(CONFIGURE OUTPUT ${OUT} CONTENT "#include \"@HEADER@\"\n\nconst char @NAME@[] = {@bytes@0};\nconst size_t @NAME@_bytes = @size@;\n" @ONLY)
