# Read by llama-cpp-python's project() when install.py has it compiled: edgespec needs libllama and ggml alone,
# which are 40 % of the work to compile. As plain variables these win over that project's own settings, forced or not.
set(LLAVA_BUILD OFF)        # pictures and sound
set(LLAMA_BUILD_COMMON OFF) # what llama.cpp's programs share
