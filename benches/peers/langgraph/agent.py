"""The agent of the comparison: a model that answers at once, on a state of messages."""

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langgraph.graph import START, MessagesState, StateGraph

USAGE = {"input_tokens": 200, "output_tokens": 200, "total_tokens": 400}


class Echo(BaseChatModel):
    """Repeats the question in one piece, as the scripted model of the gateway does."""

    @property
    def _llm_type(self):
        return "echo"

    def _generate(self, messages, stop=None, run_manager=None, **more):
        answer = AIMessage(f"You said: {messages[-1].text}", usage_metadata=USAGE)
        return ChatResult(generations=[ChatGeneration(message=answer)])

    async def _astream(self, messages, stop=None, run_manager=None, **more):
        text = f"You said: {messages[-1].text}"
        chunk = ChatGenerationChunk(message=AIMessageChunk(text, usage_metadata=USAGE))
        if run_manager:
            await run_manager.on_llm_new_token(text, chunk=chunk)
        yield chunk


async def model(state: MessagesState):
    return {"messages": [await Echo().ainvoke(state["messages"])]}


graph = StateGraph(MessagesState).add_node("model", model).add_edge(START, "model").compile()
