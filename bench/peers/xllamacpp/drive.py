"""Runs llama.cpp (xllamacpp's prebuilt wheel) on the engine benchmark's prompts:

its server, in this process, with its own timings.
"""

import argparse
import json
import threading
import time

import xllamacpp as xlc


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", required=True, help="a .gguf file")
    p.add_argument("--plan", required=True, help="JSON: cold (ids), turns (lists of ids), decode {sessions: tokens}")
    p.add_argument("--out", required=True)
    p.add_argument("--threads", type=int, default=2)
    args = p.parse_args()
    with open(args.plan, encoding="utf-8") as f:
        plan = json.load(f)
    most = max(int(n) for n in plan["decode"])
    params = xlc.CommonParams()
    params.model.path = args.model
    params.n_parallel = most
    params.n_ctx = most * 2048
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    params.warmup = True
    server = xlc.Server(params)

    def ask(ids, count, slot=-1):
        began = time.perf_counter()
        answer = server.handle_completions(
            {
                "prompt": ids,
                "n_predict": count,
                "temperature": 0,
                "cache_prompt": True,
                "id_slot": slot,
                "ignore_eos": True,
                "return_tokens": True,
            }
        )
        answer = json.loads(answer) if isinstance(answer, str) else answer
        if "timings" not in answer:
            raise RuntimeError(str(answer)[:400])
        return answer, time.perf_counter() - began

    result = {"version": xlc.__name__, "threads": args.threads}
    ask(plan["cold"][:8], 2)
    cold = []
    for k in range(plan["trials"]):
        # Uses a different first token each time, so that nothing is cached.
        answer, _ = ask([plan["cold"][0] + 1 + k, *plan["cold"][1:]], 1)
        cold.append(answer["timings"]["prompt_ms"] / 1000)
    result["ttft_cold_s"] = sorted(cold)[len(cold) // 2]
    ids, times = [], []
    for turn in plan["turns"]:
        ids += turn
        answer, _ = ask(ids, plan["answer"], 0)
        times.append(answer["timings"]["prompt_ms"] / 1000)
        ids += answer.get("tokens") or []
    result["ttft_turns_s"] = times
    result["decode"] = {}
    for sessions, count in plan["decode"].items():
        n = int(sessions)
        each = [None] * n

        def one(k, count=count, each=each):
            each[k] = ask([plan["cold"][0] + 50 + k, *plan["cold"][1:16]], count, k)[0]["timings"]

        began = time.perf_counter()
        threads = [threading.Thread(target=one, args=(k,)) for k in range(n)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        took = time.perf_counter() - began
        prompt_s = max(t["prompt_ms"] for t in each) / 1000
        result["decode"][sessions] = n * (count - 1) / (took - prompt_s)
    with open(args.out, "w", encoding="utf-8") as f:
        json.dump(result, f, indent=1)


main()
