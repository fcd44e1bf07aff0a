# CMake's toolchain for the boards: Debian's cross compilers; on an ARM machine they are its own.
#   PI_TRIPLE   aarch64-linux-gnu
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES PI_TRIPLE)
set(CMAKE_SYSTEM_NAME Linux)
string(REGEX MATCH "^[^-]+" CMAKE_SYSTEM_PROCESSOR "${PI_TRIPLE}")
set(CMAKE_C_COMPILER ${PI_TRIPLE}-gcc)
set(CMAKE_CXX_COMPILER ${PI_TRIPLE}-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
