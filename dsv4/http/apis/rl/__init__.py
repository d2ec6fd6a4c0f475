"""The routes of `dsv4 serve --rl`, in the words of vLLM and of SGLang: rollouts by token ids, pause, new weights."""
