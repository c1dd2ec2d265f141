"""A server of the OpenAI protocol over one pool. `scheduler` owns the model, `app` speaks HTTP; they meet in `job`."""
