"""An HTTP server over one pool, with the protocols of OpenAI, Anthropic, Ollama and llama-server.

`scheduler` owns the model, `app` speaks HTTP; they meet in `job`.
"""
