# Horovod asks CMake for C++14; torch's headers need C++17, and its bundled flatbuffers compiles with new compilers only as
# C++20. CMake appends its standard after all flags, so only what "C++14" stands for can be changed.
# CMake reads this file as toolchain file and then again, because of the next line, after its compiler defaults.
set(CMAKE_USER_MAKE_RULES_OVERRIDE_CXX "${CMAKE_CURRENT_LIST_FILE}")
if(DEFINED CMAKE_CXX14_STANDARD_COMPILE_OPTION)
  set(CMAKE_CXX11_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++20")
endif()

# Horovod tries any nvcc it finds, also for a CPU build, and stops if that nvcc does not fit.
if(DEFINED ENV{HOROVOD_WITHOUT_CUDA})
  set(CMAKE_CUDA_COMPILER "")
  set(CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit ON)
endif()
