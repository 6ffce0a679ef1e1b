"""Generation with vLLM, in this process (colocate) or in a server beside it.

versions    which releases are known to speak as this package does
requests    sampling settings and requests in vLLM's words, and its answers in ours
base        when the weights must be sent again, and what is known of those that vLLM holds
claims      one process a server, and whose weights it holds
client      HTTP to a stock server: a time limit on every call, and no weight update is ever repeated
transfer    weights to a server: by CUDA IPC on one GPU, by NCCL between GPUs
server      the backend that samples there
inflight    a generation that it samples in the background
colocate    the backend that samples in this process
choose      which of the two a config asks for
threads     waits that do not keep a program from ending
serve       `gruppo vllm-serve`
"""
