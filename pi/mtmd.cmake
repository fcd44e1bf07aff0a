# What images.cmake and pi/variants.cmake change in libmtmd, a target `mtmd` of llama.cpp's `folder`.
function(edgespec_change_mtmd folder)
  set_property(TARGET mtmd PROPERTY VERSION) # loaded by its plain name
  set_property(TARGET mtmd PROPERTY SOVERSION)
  get_target_property(files mtmd SOURCES)

  # Rows of Pixtral's line ends are made of memory that nothing has written, times 0: NaN, if it was that before.
  set(mended ${CMAKE_BINARY_DIR}/mtmd/pixtral.cpp)
  file(READ ${folder}/models/pixtral.cpp text)
  string(REPLACE "ggml_scale(ctx0, tok, 0.0)" "ggml_fill(ctx0, tok, 0.0f)" new "${text}")
  if(new STREQUAL text)
    message(FATAL_ERROR "${folder}/models/pixtral.cpp is not as pi/mtmd.cmake knows it; look whether it is mended there")
  endif()
  file(GENERATE OUTPUT ${mended} CONTENT "#line 1 \"pixtral.cpp\"\n${new}") # no folder of this machine
  list(TRANSFORM files REPLACE "^models/pixtral\\.cpp$" ${mended})
  target_include_directories(mtmd PRIVATE ${folder}/models)

  # One compiler reads the headers for a quarter of the encoders, not for each of some forty.
  set_target_properties(mtmd PROPERTIES SOURCES "${files}" UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
  list(FILTER files EXCLUDE REGEX "^models/|pixtral")
  list(TRANSFORM files PREPEND ${folder}/)
  set_source_files_properties(${files} TARGET_DIRECTORY mtmd PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
endfunction()
