# Horovod requests C++14 from CMake, but torch's headers require C++17, and with new compilers Horovod's bundled flatbuffers
# requires C++20. CMake appends the standard after all other flags, so this file redefines the flag for C++14.
# CMake reads this file as the toolchain file and, because of the next line, again after its compiler defaults.
set(CMAKE_USER_MAKE_RULES_OVERRIDE_CXX "${CMAKE_CURRENT_LIST_FILE}")
if(DEFINED CMAKE_CXX14_STANDARD_COMPILE_OPTION)
  set(CMAKE_CXX11_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++20")
endif()

# Even in a CPU build, Horovod tries any nvcc that it finds, and fails if that nvcc is incompatible.
if(DEFINED ENV{HOROVOD_WITHOUT_CUDA})
  set(CMAKE_CUDA_COMPILER "")
  set(CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit ON)
endif()
