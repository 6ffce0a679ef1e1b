"""Generation with vLLM, in this process (colocate) or in a server beside it.

versions    the supported releases of vLLM
requests    converts sampling settings and requests to vLLM's format, and its answers to ours
base        decides when the weights must be sent again, and tracks which weights vLLM holds
claims      locks a server for one process, and tracks whose weights it holds
client      HTTP to a stock server: a time limit on every call; weight updates are never retried
transfer    sends weights to a server: by CUDA IPC on one GPU, by NCCL between GPUs
server      the backend that samples from a server
inflight    a generation that a server samples in the background
colocate    the backend that samples in this process
choose      which of the two backends a config asks for
threads     threads that do not keep the program from exiting
serve       `gruppo vllm-serve`
"""
