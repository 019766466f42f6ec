"""``streams.py URL COUNT TOKENS``: open COUNT streams at once; say "flowing" when all have begun, then what came."""

import json
import sys
import threading
import time
import urllib.error
import urllib.request


def wait_ready(url, seconds=120.0):
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (OSError, urllib.error.URLError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def stream(url, number, tokens, out, flowing):
    """Seeded, with logprobs: the tokens are counted one by one. Every second one is greedy."""
    body = {
        "prompt": f"Once upon a time there were {number}", "max_tokens": tokens, "ignore_eos": True, "stream": True,
        "seed": number, "temperature": number % 2, "logprobs": 1, "stream_options": {"include_usage": True},
    }  # fmt: skip
    head = {"Content-Type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), head)
    got = out[number] = {"text": "", "tokens": [], "usage": None, "finish": None}
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            got["usage"] = event.get("usage") or got["usage"]
            if "error" in event:
                got["error"] = event["error"]
            for choice in event.get("choices", ()):
                got["text"] += choice["text"]
                got["tokens"] += (choice.get("logprobs") or {}).get("tokens", [])
                got["finish"] = choice["finish_reason"] or got["finish"]
            if len(got["tokens"]) >= 5:
                flowing.release()


def main(url, count, tokens):
    wait_ready(url)
    out, flowing = {}, threading.Semaphore(0)
    threads = [
        threading.Thread(target=stream, args=(url, number, int(tokens), out, flowing)) for number in range(int(count))
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and any(len(got["tokens"]) < 5 for got in out.values()):
        flowing.acquire(timeout=0.1)
    print("flowing", flush=True)
    for thread in threads:
        thread.join()
    print(json.dumps(out), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
