"""OpenAI's own client and a model of yours: `pip install 'halfbyte[serve]' openai`.

The server is started here; give the address of one that runs, such as http://127.0.0.1:8080, to take that.
"""

import subprocess
import sys

from openai import OpenAI

command = [sys.executable, "-m", "halfbyte", "serve", "tiny", "--port", "0"]  # in a shell: halfbyte serve
server = None if len(sys.argv) > 1 else subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    address = server.stdout.readline().split()[-1] if server else sys.argv[1]  # its first line ends in its address
    client = OpenAI(base_url=f"{address}/v1", api_key="none")  # `serve --api-key KEY` asks for that one
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": "Tell me a story about a fox and a lantern."}],
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    usage = chunk.usage  # the last chunk has no text, only this
    print(f"\n\n{usage.prompt_tokens} tokens of a prompt, {usage.completion_tokens} of a reply")
finally:
    if server:
        server.terminate()  # it lets replies under way end first
        server.wait()
