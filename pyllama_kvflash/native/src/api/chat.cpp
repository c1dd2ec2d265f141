// conversations, by llama.cpp's own templates and parsers: see kvflash.h

#include "api/guard.h"
#include "api/template.h"

#include "chat.h"
#include "common.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "log.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>

using json = common_json;

struct kvf_chat {
    const llama_vocab *       vocab = nullptr;
    common_chat_templates_ptr templates;
};

// an incremental parser: it parses the whole answer again after each addition
struct kvf_reply {
    common_chat_parser_params params;
    std::string               text;
    common_chat_msg           said;
    std::vector<std::string>  ids; // of the tool calls
};

static const char * const BEFORE_CAUSE = "Error: ";

// llama.cpp's error as one line, without the quoted template around the cause
static kvf_failure in_words(const std::exception & err, int status = KVF_E_ARGUMENT) {
    std::string what = err.what();
    const auto  pos  = what.rfind(BEFORE_CAUSE);
    if (pos != std::string::npos) { what = what.substr(pos + strlen(BEFORE_CAUSE)); }
    what = what.substr(what.find_first_not_of("\n ") == std::string::npos ? 0 : what.find_first_not_of("\n "));
    std::replace(what.begin(), what.end(), '\n', ' ');
    return kvf_failure(status, what);
}

// run f, which interprets a template, with a time limit. throws KVF_E_UNSUPPORTED if the template exceeds a limit
static void limited(double seconds, const std::function<void()> & f) {
    struct scope {
        ~scope() { kvf_template = {}; }
    } const ends;
    kvf_template          = {};
    kvf_template.deadline = kvf_template_run::clock::now() + std::chrono::microseconds((int64_t) (seconds * 1e6));
    try {
        f();
    } catch (const kvf_failure &) { throw; } catch (const std::exception & err) {
        throw in_words(err, kvf_template.refused ? KVF_E_UNSUPPORTED : KVF_E_ARGUMENT);
    }
}

// a copy of the text, for the caller to free
static char * copied(const std::string & text) {
    char * res = (char *) malloc(text.size() + 1);
    if (!res) { throw std::bad_alloc(); }
    memcpy(res, text.c_str(), text.size() + 1);
    return res;
}

void kvf_text_free(char * text) { free(text); }

// refuse deeply nested templates: llama.cpp's parser recurses at each level, and would overflow the stack
static void check_nesting(const std::vector<jinja::token> & tokens) {
    using type     = jinja::token::type;
    int statements = 0, length = 0, depth = 0; // length and depth of one statement or expression
    for (const auto & token : tokens) {
        switch (token.t) {
            case type::open_statement: ++statements; [[fallthrough]];
            case type::open_expression: length = depth = 0; break;
            case type::open_paren:
            case type::open_square_bracket:
            case type::open_curly_bracket: ++depth; break;
            case type::close_paren:
            case type::close_square_bracket:
            case type::close_curly_bracket: --depth; break;
            default: break;
        }
        if (statements > 2000 || ++length > 10000 || depth > 400) { kvf_template_refuse("it is nested too deeply"); }
    }
}

// refuse a template that cannot be parsed: the exception of common_chat_templates_init() has lost its message
static void check_readable(const std::string & source) {
    jinja::lexer lexer;
    const auto   lexed = lexer.tokenize(source);
    check_nesting(lexed.tokens);
    jinja::parse_from_tokens(lexed);
}

int kvf_chat_new(const llama_model * model, const char * source, double seconds, kvf_chat ** chat) {
    return kvf_guard([&] {
        kvf_check(model && source && chat, "model, source and chat must not be null");
        static std::once_flag once;
        std::call_once(once, [] { common_log_set_verbosity_thold(-1); }); // errors come as exceptions

        auto res   = std::make_unique<kvf_chat>();
        res->vocab = llama_model_get_vocab(model);
        limited(seconds, [&] {
            for (const char * name : {(const char *) nullptr, "tool_use"}) {
                const char * own = *source ? source : llama_model_chat_template(model, name);
                if (own) { check_readable(own); }
            }
            res->templates = common_chat_templates_init(model, source);
        });
        *chat = res.release();
    });
}

void kvf_chat_free(kvf_chat * chat) { delete chat; }

//
// from a conversation to a prompt
//

static common_chat_templates_inputs inputs_of(const json & request) {
    common_chat_templates_inputs res;
    res.messages              = common_chat_msgs_parse_oaicompat(request.at("messages"));
    res.tools                 = common_chat_tools_parse_oaicompat(request.value("tools", json::array()));
    res.tool_choice           = common_chat_tool_choice_parse_oaicompat(request.value("tool_choice", "auto"));
    res.parallel_tool_calls   = request.value("parallel_tool_calls", false);
    res.add_generation_prompt = request.value("add_generation_prompt", true);
    res.enable_thinking       = request.value("enable_thinking", true);
    if (request.value("continue_final_message", false)) { res.continue_final_message = COMMON_CHAT_CONTINUATION_AUTO; }
    res.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
    if (request.contains("json_schema")) { res.json_schema = request.at("json_schema").dump(); }
    const json kwargs = request.value("chat_template_kwargs", json::object()); // items() does not extend its lifetime
    for (const auto & [key, val] : kwargs.items()) {
        res.chat_template_kwargs[key] = val.dump();
    }
    return res;
}

// the trigger of a lazy grammar as JSON. a word that is a single token becomes that token
static json trigger_of(const llama_vocab * vocab, const common_grammar_trigger & trigger) {
    switch (trigger.type) {
        case COMMON_GRAMMAR_TRIGGER_TYPE_WORD: {
            const auto tokens = common_tokenize(vocab, trigger.value, false, true);
            if (tokens.size() == 1) { return json{{"token", tokens[0]}}; }
            return json{{"pattern", regex_escape(trigger.value)}};
        }
        case COMMON_GRAMMAR_TRIGGER_TYPE_TOKEN: return json{{"token", trigger.token}};
        case COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL: return json{{"pattern", "^" + trigger.value + "$"}};
        default: return json{{"pattern", trigger.value}};
    }
}

int kvf_chat_apply(const kvf_chat * chat, const char * request, double seconds, char ** result) {
    return kvf_guard([&] {
        kvf_check(chat && request && result, "chat, request and result must not be null");
        common_chat_params params;
        limited(seconds,
                [&] { params = common_chat_templates_apply(chat->templates.get(), inputs_of(json::parse(request))); });

        json triggers = json::array(), preserved = json::array();
        for (const auto & trigger : params.grammar_triggers) {
            triggers.push_back(trigger_of(chat->vocab, trigger));
        }
        for (const auto & text : params.preserved_tokens) {
            const auto tokens = common_tokenize(chat->vocab, text, false, true);
            if (tokens.size() == 1) { preserved.push_back(tokens[0]); }
        }
        *result = copied(json{
                {"prompt", params.prompt},
                {"grammar", params.grammar},
                {"lazy", params.grammar_lazy},
                {"triggers", triggers},
                {"preserved", preserved},
                {"stop", params.additional_stops},
                {"generation_prompt", params.generation_prompt},
                {"thinking_start", params.thinking_start_tag},
                {"thinking_end", params.thinking_end_tags},
                {"format", (int) params.format},
                {"parser", params.parser},
        }
                                 .dump_safe());
    });
}

int kvf_chat_caps(const kvf_chat * chat, char ** result) {
    return kvf_guard([&] {
        kvf_check(chat && result, "chat and result must not be null");
        *result = copied(json(common_chat_templates_get_caps(chat->templates.get())).dump());
    });
}

//
// from an answer to its contents
//

int kvf_reply_new(int32_t format, const char * parser, const char * generation_prompt, kvf_reply ** reply) {
    return kvf_guard([&] {
        kvf_check(parser && generation_prompt && reply, "parser, generation_prompt and reply must not be null");
        kvf_check(format >= 0 && format < COMMON_CHAT_FORMAT_COUNT, "the chat format is unknown");
        auto res = std::make_unique<kvf_reply>();
        try {
            if (*parser) { res->params.parser.load(parser); }
        } catch (const std::exception & err) { throw in_words(err); }
        res->params.format            = (common_chat_format) format;
        res->params.reasoning_format  = COMMON_REASONING_FORMAT_AUTO;
        res->params.generation_prompt = generation_prompt;
        try {
            res->said = common_chat_parse("", true, res->params); // the deltas leave out the generation prompt
        } catch (const std::exception & err) { throw in_words(err); }
        *reply = res.release();
    });
}

void kvf_reply_free(kvf_reply * reply) { delete reply; }

// a random ID for a tool call. some templates accept only IDs of nine letters and digits
static std::string new_id() {
    static const char         letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    thread_local std::mt19937 random{std::random_device{}()};
    std::string               res;
    for (int i = 0; i < 9; ++i) {
        res += letters[std::uniform_int_distribution<size_t>(0, sizeof(letters) - 2)(random)];
    }
    return res;
}

static json delta_of(const common_chat_msg_diff & diff) {
    if (!diff.reasoning_content_delta.empty()) { return json{{"reasoning", diff.reasoning_content_delta}}; }
    if (diff.tool_call_index == std::string::npos) { return json{{"content", diff.content_delta}}; }
    const auto & call = diff.tool_call_delta;
    return json{
            {"call", (int64_t) diff.tool_call_index}, {"id", call.id}, {"name", call.name}, {"arguments", call.arguments}};
}

int kvf_reply_push(kvf_reply * reply, const char * text, bool partial, char ** deltas) {
    return kvf_guard([&] {
        kvf_check(reply && text && deltas, "reply, text and deltas must not be null");
        reply->text += text;
        json found = json::array();
        try {
            auto said = common_chat_parse(reply->text, partial, reply->params);
            said.set_tool_call_ids(reply->ids, new_id);
            for (const auto & diff : common_chat_msg_diff::compute_diffs(reply->said, said)) {
                found.push_back(delta_of(diff));
            }
            reply->said = std::move(said);
        } catch (const std::exception & err) { throw in_words(err); }
        *deltas = copied(found.dump_safe());
    });
}
