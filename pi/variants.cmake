# Read by llama-cpp-python's project() when its library is compiled for all processors of a kind (pi/manylinux.py):
# llama_cpp.cmake, and beside libllama ggml's CPU backend once for each set of features, and OpenMP's library.
#   EDGESPEC_OPENMP   libgomp.so.1 of the machines that it is for
include(${CMAKE_CURRENT_LIST_DIR}/../llama_cpp.cmake)
set(LLAVA_BUILD ON) # libmtmd, which reads images; from sources `make images` builds it
set(MTMD_VIDEO OFF)
include(${CMAKE_CURRENT_LIST_DIR}/mtmd.cmake)

function(edgespec_add_cpu_variants)
  set_property(TARGET llama PROPERTY VERSION) # libmtmd asks for it by the name that is in the wheel
  set_property(TARGET llama PROPERTY SOVERSION)
  edgespec_change_mtmd(${CMAKE_CURRENT_SOURCE_DIR}/vendor/llama.cpp/tools/mtmd)
  foreach(backend ${GGML_AVAILABLE_BACKENDS})
    if(backend MATCHES "^ggml-cpu-")
      set_property(TARGET ${backend} PROPERTY VERSION)   # loaded by its plain name
      set_property(TARGET ${backend} PROPERTY SOVERSION)
      llama_cpp_python_install_target(${backend})
    endif()
  endforeach()
  # Not on every machine; ggml and edgespec's kernels share this one.
  install(FILES ${EDGESPEC_OPENMP} DESTINATION ${SKBUILD_PLATLIB_DIR}/llama_cpp/lib)
endfunction()
cmake_language(DEFER CALL edgespec_add_cpu_variants)
