"""The step on CPUs in C++."""
