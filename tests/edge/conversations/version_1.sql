-- A database of version 1, with PRAGMA user_version and application_id as that version set them.
PRAGMA application_id = 1701999971;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE conversation (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            title TEXT NOT NULL,
            titled_by_user INTEGER NOT NULL,
            folder TEXT,
            pinned INTEGER NOT NULL,
            system TEXT NOT NULL,
            sampling TEXT NOT NULL,
            model TEXT,
            leaf TEXT REFERENCES message (id) ON DELETE SET NULL,
            created REAL NOT NULL,
            updated REAL NOT NULL,
            deleted REAL
        );
INSERT INTO "conversation" VALUES(1,'c2c4940fa3c102b7','How do I list files?',0,'work',1,'Be brief.','{"temperature": 0.5}','shell-helper','a4e42e47d92cbd1a',1795385238.0,1795385238.0,NULL);
INSERT INTO "conversation" VALUES(2,'a3a12b7db137735b','gone',1,NULL,0,'','{}',NULL,NULL,1795385238.0,1795385238.0,9000000000.0);
CREATE TABLE message (
            number INTEGER PRIMARY KEY,
            id TEXT NOT NULL UNIQUE,
            conversation TEXT NOT NULL REFERENCES conversation (id) ON DELETE CASCADE,
            parent TEXT REFERENCES message (id) ON DELETE CASCADE,
            role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
            content TEXT NOT NULL,
            attachments TEXT,
            created REAL NOT NULL,
            model TEXT,
            state TEXT NOT NULL
                CHECK (state IN ('complete', 'writing', 'stopped', 'length', 'failed', 'interrupted')),
            error TEXT,
            stats TEXT,
            writer TEXT,
            deleted REAL,
            deleted_with TEXT
        );
INSERT INTO "message" VALUES(1,'86b9f3ddc71bf938','c2c4940fa3c102b7',NULL,'user','How do I list files?','[["notes.txt", "one\ntwo\n"]]',1795385238.0,NULL,'complete',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "message" VALUES(2,'4952b29caef74bd0','c2c4940fa3c102b7','86b9f3ddc71bf938','assistant','ls -l',NULL,1795385238.0,'shell-helper','complete',NULL,'{"completion_tokens": 2}',NULL,NULL,NULL);
INSERT INTO "message" VALUES(3,'a4e42e47d92cbd1a','c2c4940fa3c102b7','86b9f3ddc71bf938','assistant','find . – größer',NULL,1795385238.0,'shell-helper','complete',NULL,NULL,NULL,NULL,NULL);
INSERT INTO "message" VALUES(4,'a23198d176fec72e','c2c4940fa3c102b7','a4e42e47d92cbd1a','user','deleted question',NULL,1795385238.0,NULL,'complete',NULL,NULL,NULL,9000000000.0,'a23198d176fec72e');
CREATE TABLE preset (name TEXT PRIMARY KEY, system TEXT NOT NULL, sampling TEXT NOT NULL);
INSERT INTO "preset" VALUES('short','Be brief.','{"max_tokens": 50}');
CREATE TABLE setting (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO "setting" VALUES('theme','"dark"');
CREATE TABLE token_part (
            message TEXT NOT NULL REFERENCES message (id) ON DELETE CASCADE,
            start INTEGER NOT NULL,
            count INTEGER NOT NULL,
            tokens BLOB NOT NULL,
            PRIMARY KEY (message, start)
        );
INSERT INTO "token_part" VALUES('4952b29caef74bd0',0,1,X'78011D8B410A80300C04BF2239AB78F1E2574A0F6A53A986B6C40882F877136FBB33BBEE8114606AC6B601C15B34029DA08DCA56B92C0ABAA1FF75A95A9C5777A46C27A88C3111D93CF01C055969BE881430EEB80ADACEC8EB3F5DE41FF1');
CREATE INDEX conversation_updated ON conversation (updated);
CREATE INDEX conversation_leaf ON conversation (leaf);
CREATE INDEX message_conversation ON message (conversation);
CREATE INDEX message_parent ON message (parent);
CREATE INDEX message_writing ON message (writer) WHERE writer IS NOT NULL;
CREATE INDEX message_deleted ON message (deleted) WHERE deleted IS NOT NULL;
COMMIT;
