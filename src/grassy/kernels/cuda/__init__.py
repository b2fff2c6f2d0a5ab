"""The step on NVIDIA GPUs in CUDA C++. README.md says which file holds what."""
