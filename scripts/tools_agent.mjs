// An agent built with the official SDK of the Agent Client Protocol: asks for permission, then answers in pieces.
import { Readable, Writable } from "node:stream";
import { agent, methods, ndJsonStream } from "@agentclientprotocol/sdk";

agent({ name: "checked" })
  .onRequest(methods.agent.initialize, ({ params }) => ({
    protocolVersion: params.protocolVersion, agentCapabilities: { mcpCapabilities: { http: true } },
  }))
  .onRequest(methods.agent.session.new, ({ params }) => ({ sessionId: `session of ${params.mcpServers.length} servers` }))
  .onRequest(methods.agent.session.prompt, async ({ params, client }) => {
    const { sessionId } = params;
    const asked = await client.request(methods.client.session.requestPermission, {
      sessionId,
      toolCall: { toolCallId: "c", title: "Do it", kind: "execute", status: "pending" },
      options: [
        { optionId: "always", name: "Always", kind: "allow_always" },
        { optionId: "once", name: "Once", kind: "allow_once" },
      ],
    });
    for (const text of [sessionId, `, allowed ${asked.outcome.optionId}`, `, asked: ${params.prompt[0].text}`]) {
      const update = { sessionUpdate: "agent_message_chunk", content: { type: "text", text } };
      await client.notify(methods.client.session.update, { sessionId, update });
    }
    return { stopReason: "end_turn" };
  })
  .onNotification(methods.agent.session.cancel, () => {})
  .connect(ndJsonStream(Writable.toWeb(process.stdout), Readable.toWeb(process.stdin)));
