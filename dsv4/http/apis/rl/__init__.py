"""The routes of `dsv4 serve --rl`, in the words of vLLM and of SGLang: a trainer pauses the engine, gives it new weights,
and asks for rollouts by token ids. Absent without the option."""
