"""The endpoints that generate answers, and their protocols."""

from pyllama_kvflash.serve.protocols import (
    anthropic_request,
    llama_request,
    ollama_request,
    ollama_response,
    openai_request,
    responses_request,
)
from pyllama_kvflash.serve.protocols.anthropic_response import AnthropicReply, too_long
from pyllama_kvflash.serve.protocols.llama_response import LlamaReply
from pyllama_kvflash.serve.protocols.openai_response import OpenAIReply
from pyllama_kvflash.serve.protocols.reply import AnswerProtocol
from pyllama_kvflash.serve.protocols.responses_response import ResponsesReply

ANSWERS = {
    "/v1/chat/completions": AnswerProtocol(openai_request.chat, OpenAIReply),
    "/v1/completions": AnswerProtocol(openai_request.completion, OpenAIReply),
    "/chat/completions": AnswerProtocol(openai_request.chat, OpenAIReply),
    "/completion": AnswerProtocol(llama_request.completion, LlamaReply),
    "/completions": AnswerProtocol(llama_request.completion, LlamaReply),
    "/infill": AnswerProtocol(llama_request.infilling, LlamaReply),
    "/v1/messages": AnswerProtocol(anthropic_request.parse, AnthropicReply, too_long),
    "/v1/responses": AnswerProtocol(responses_request.parse, ResponsesReply),
    "/api/chat": AnswerProtocol(ollama_request.chat, ollama_response.ChatReply, media=ollama_response.MEDIA),
    "/api/generate": AnswerProtocol(
        ollama_request.generate, ollama_response.GenerateReply, media=ollama_response.MEDIA
    ),
}
"""The protocols by path. All paths take POST."""
