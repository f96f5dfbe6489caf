"""llama.cpp's server on a port of this machine: serve_llamacpp.py MODEL.gguf PORT."""

import sys
import threading

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path, params.port = sys.argv[1], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.use_jinja = 16_384, 4, True
params.cpuparams.n_threads = 2
server = xllamacpp.Server(params)
print(f"ready at {server.listening_address}", flush=True)
threading.Event().wait()
