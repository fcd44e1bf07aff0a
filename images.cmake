# Read by llama-cpp-python's project() when `make images` compiles it (pi/images.py): in the place of all else libmtmd,
# llama.cpp's encoders of pictures, linked with the libllama and ggml that are installed.
#   EDGESPEC_LIBRARIES   their folder, llama_cpp/lib
set(LLAMA_BUILD OFF)
set(BUILD_SHARED_LIBS ON)
set(MTMD_VIDEO OFF)
set(CMAKE_INSTALL_RPATH "$ORIGIN")
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)

set(sources ${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp)
function(llama_add_compile_flags) # of warnings
endfunction()
foreach(library llama ggml ggml-base)
  add_library(${library} SHARED IMPORTED)
  set_target_properties(${library} PROPERTIES IMPORTED_LOCATION ${EDGESPEC_LIBRARIES}/lib${library}.so
    INTERFACE_INCLUDE_DIRECTORIES "${sources}/include;${sources}/ggml/include")
endforeach()
target_link_libraries(ggml INTERFACE ggml-base)
add_subdirectory(${sources}/vendor)
add_subdirectory(${sources}/tools/mtmd)
include(${CMAKE_CURRENT_LIST_DIR}/pi/mtmd.cmake)
edgespec_change_mtmd(${sources}/tools/mtmd)
