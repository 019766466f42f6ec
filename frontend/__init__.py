"""The HTTP process: OpenAI's routes, shapes and errors, server-sent events, metrics.

It owns client connections, and through ``client.Engine`` the requests behind them. It talks to detokenizers and to
the scheduler only by way of Engine. It must never tokenize, never queue without a bound, and never let one client's
request, however odd, slow or broken, touch another's.
"""
