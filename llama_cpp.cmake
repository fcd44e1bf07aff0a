# Read by llama-cpp-python's project() when edgespec has it compiled (install.py, pi/manylinux.py). edgespec needs libllama
# and ggml alone, which are 40 % of the work to compile. As plain variables these win over that project's own settings,
# forced or not.
set(LLAVA_BUILD OFF)        # pictures and sound
set(LLAMA_BUILD_COMMON OFF) # what llama.cpp's programs share

# llama.cpp's kernels for AMX end the process (llama.cpp #20824, #26954) where the compiler drops what it writes for
# _tile_loadconfig: GCC before 13.3 does (GCC's bug 114098; seen with Debian 12's on a Sapphire Rapids), clang does not.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13.3)
  add_compile_options(-U__AMX_INT8__)
endif()

# Beside libllama: llama.cpp's RPC backend, which edgespec/llama/rpc.py loads where layers lie on other machines, and this
# file, by which `make` sees that another one was compiled with. Beside ggml's public headers: a private one, for tests.
function(edgespec_add_rpc_backend)
  if(NOT TARGET ggml-base OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
    return()
  endif()
  find_package(Threads REQUIRED)
  set(ggml ${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp/ggml/src)
  add_library(ggml_rpc MODULE ${ggml}/ggml-rpc/ggml-rpc.cpp ${ggml}/ggml-rpc/transport.cpp)
  set_target_properties(ggml_rpc PROPERTIES PREFIX "")
  target_compile_features(ggml_rpc PRIVATE cxx_std_17)
  target_compile_definitions(ggml_rpc PRIVATE GGML_BACKEND_DL GGML_BACKEND_SHARED GGML_BACKEND_BUILD)
  target_include_directories(ggml_rpc PRIVATE ${ggml})
  target_link_libraries(ggml_rpc PRIVATE ggml-base Threads::Threads)
  llama_cpp_python_install_target(ggml_rpc)
  install(FILES ${CMAKE_CURRENT_FUNCTION_LIST_FILE} DESTINATION ${SKBUILD_PLATLIB_DIR}/llama_cpp/lib)
  install(FILES ${ggml}/ggml-impl.h DESTINATION include/ggml-private)
endfunction()
cmake_language(DEFER CALL edgespec_add_rpc_backend)
