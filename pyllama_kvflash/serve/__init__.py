"""A server of the OpenAI and Anthropic protocols over one pool.

`scheduler` owns the model, `app` speaks HTTP; they meet in `job`.
"""
